//! Child processes, and the programs that they run.

use std::path::PathBuf;
use std::process;
use std::time::{Duration, Instant};
use std::{env, io, thread};

/// Waits for the child, or kills it and returns `None`.
///
/// # Errors
/// Returns an error if the child cannot be waited for.
pub fn wait(child: &mut process::Child, limit: Duration) -> io::Result<Option<process::ExitStatus>> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the path of a file that Cargo built: in the folder of the running test, or in the folder above it.
///
/// # Panics
/// Panics if the file does not exist.
pub fn built(name: &str) -> PathBuf {
    let test = env::current_exe().unwrap_or_else(|error| panic!("the path of this test is not known: {error}"));
    let places = test.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let found = places.clone().find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("{name} was not built: {:?}", places.collect::<Vec<_>>()))
}
