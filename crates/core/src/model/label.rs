use std::fmt;

/// A name that the program gives to a block of memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Label {
    /// The name, such as `layer1.weight`.
    pub name: String,
    /// The sizes of its dimensions.
    pub shape: Vec<usize>,
    /// The type of its elements, such as `f32`.
    pub dtype: String,
}

impl Label {
    /// Creates a label with only a name.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), shape: Vec::new(), dtype: String::new() }
    }
}

/// Prints a shape: `(512, 512, 3, 3)`, and `(64,)` if there is one dimension.
pub struct Shape<'a>(pub &'a [usize]);

impl fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [only] = self.0 {
            return write!(f, "({only},)");
        }
        let sizes: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        write!(f, "({})", sizes.join(", "))
    }
}
