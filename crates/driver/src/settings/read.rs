//! Reads the environment variables.

use std::{env, ffi::OsString};

use once_cell::race::OnceBox;

use super::{
    parse::InvalidValue,
    values::{SOURCE, SetVariable, Setting, Settings},
    variables::{VARIABLES, Variable},
};
use crate::{error::Kind, model::bounded};

/// The maximum number of characters of a value that are shown.
const SHOWN: usize = 1000;

/// Several threads may read the variables at the same time. No thread waits for another, which might not exist in the child process of a
/// fork.
static SETTINGS: OnceBox<Settings> = OnceBox::new();

/// Uses these settings instead of those from the environment. Has no effect after the first use of the settings.
pub fn preset(settings: Settings) {
    let _ = SETTINGS.set(Box::new(settings));
}

/// Returns the settings of this process. They are read at the first use.
pub fn settings() -> &'static Settings {
    SETTINGS.get_or_init(|| Box::new(Settings::read(|name| env::var_os(name))))
}

impl Settings {
    /// Returns the settings for a process whose program was not built for gpumem. The variables in its environment are meant for the
    /// program, which may use gpumem itself. `backtrace` is a value of `GPUMEM_BACKTRACE`.
    pub fn of_foreign_program(backtrace: &str) -> Self {
        let values = [("GPUMEM_REPORT", "stderr"), (SOURCE, "dispatch"), ("GPUMEM_BACKTRACE", backtrace)];
        let value = |name: &str| values.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
        Self { is_foreign: true, ..Self::read(value) }
    }

    /// Reads the settings; `value` returns the value of a variable.
    pub fn read(value: impl Fn(&str) -> Option<OsString>) -> Self {
        let mut settings = Self::default();
        for variable in VARIABLES {
            let Some(text) = value(variable.name).filter(|text| !text.to_string_lossy().trim().is_empty()) else {
                continue;
            };
            let (stands_for, problem) = match (variable.read)(&text, &mut settings) {
                Ok(stands_for) => (stands_for, None),
                Err(InvalidValue { detail, instead }) => {
                    let stands_for = format!("cannot be used: {detail}; {instead}");
                    let error = Kind::BadSetting { setting: variable.name, detail }.into();
                    (stands_for, Some((error, instead)))
                }
            };
            // `status()` shows these texts.
            let [text, stands_for] =
                [&text.to_string_lossy(), &*stands_for].map(|text| bounded(text, SHOWN).into_owned());
            let Variable { name, meaning, .. } = *variable;
            settings.set.push(SetVariable { name, meaning, text, stands_for, problem });
        }
        settings
    }

    /// Returns all variables, whether or not they are set.
    pub fn all(&self) -> Vec<Setting> {
        let setting = |&Variable { name, meaning, default, .. }: &Variable| {
            let set = self.set.iter().find(|set| set.name == name);
            Setting {
                name,
                meaning,
                default,
                stands_for: set.map(|set| set.stands_for.clone()),
                is_usable: set.is_none_or(|set| set.problem.is_none()),
            }
        };
        VARIABLES.iter().map(setting).collect()
    }
}
