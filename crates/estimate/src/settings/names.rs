//! Names that match layers.

use serde::{Deserialize, Serialize};

/// Names of layers, such as those that get an adapter.
///
/// A name matches the layers whose path is the name, or ends with a dot and the name: `q_proj` also matches
/// `layers.0.self_attn.q_proj`. `*` matches any characters, including dots.
///
/// ```
/// use gpumem_estimate::Names;
///
/// let names = Names::from(["q_proj", "layers.1*.mlp"]);
/// assert!(names.contains("layers.0.self_attn.q_proj"));
/// assert!(names.contains("model.layers.12.mlp"));
/// assert!(!names.contains("layers.0.self_attn.k_proj"));
/// assert!(!names.contains("layers.12.mlp.up_proj"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Names(Vec<String>);

impl Names {
    /// Returns whether one of the names matches this path.
    pub fn contains(&self, path: &str) -> bool {
        self.0.iter().any(|name| stands_for(name, path))
    }

    /// Returns whether there are no names.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the first name that matches none of these paths.
    pub(crate) fn unused(&self, paths: &[String]) -> Option<&str> {
        let is_unused = |name: &&String| !paths.iter().any(|path| stands_for(name, path));
        self.0.iter().find(is_unused).map(String::as_str)
    }
}

impl<S: Into<String>, const N: usize> From<[S; N]> for Names {
    fn from(names: [S; N]) -> Self {
        Self(names.into_iter().map(Into::into).collect())
    }
}

fn stands_for(name: &str, path: &str) -> bool {
    let ends = path.match_indices('.').map(|(dot, _)| &path[dot + 1..]);
    [path].into_iter().chain(ends).any(|path| matches(name, path))
}

/// Matches a name against a path. `*` matches any text. Each part between two stars matches where it occurs first, so the time is at
/// most the product of both lengths.
fn matches(name: &str, path: &str) -> bool {
    let Some((first, others)) = name.split_once('*') else { return name == path };
    let (between, last) = others.rsplit_once('*').unwrap_or(("", others));
    let inner = path.strip_prefix(first).and_then(|rest| rest.strip_suffix(last));
    let after = |rest: &'_ str, part: &str| rest.find(part).map(|at| at + part.len());
    inner.is_some_and(|mut rest| {
        between.split('*').all(|part| after(rest, part).inspect(|at| rest = &rest[*at..]).is_some())
    })
}

#[cfg(test)]
mod tests {
    use super::Names;

    #[test]
    fn stars_and_ends_of_paths() {
        let contains = |name: &str, path: &str| Names::from([name]).contains(path);
        assert!(contains("*", "") && contains("*", "a.b"));
        assert!(contains("a*c", "abc") && contains("a*c", "ac") && !contains("a*c", "acb"));
        assert!(contains("*a*b*", "xaybz") && contains("a**b", "axb"));
        assert!(contains("b.c", "a.b.c") && !contains("b", "a.b.c") && !contains("c", "a.bc"));
        assert!(!contains("", "a") && contains("", ""));
    }
}
