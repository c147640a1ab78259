use std::fmt;

/// The kind of a device: one of the CUDA driver, a simulated one, or a gauge of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// A device of the CUDA driver.
    Cuda,
    /// A simulated device.
    Simulated,
    /// A function of the program that reads memory.
    Custom,
}

/// One device of this process. The ordinal is CUDA's, or the index of a simulated device or of a custom gauge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    /// The kind of the device.
    pub family: Family,
    /// The ordinal of the device, starting at 0.
    pub ordinal: u32,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.family {
            Family::Cuda => write!(f, "device {}", self.ordinal),
            Family::Simulated => write!(f, "simulated device {}", self.ordinal),
            Family::Custom => write!(f, "gauge {} of the program", self.ordinal),
        }
    }
}
