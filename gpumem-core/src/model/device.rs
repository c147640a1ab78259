use std::fmt;

/// Where a device number belongs to: the CUDA driver's devices, or the simulated ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    Cuda,
    Simulated,
}

/// One device of this process: a CUDA ordinal, or the number of a simulated device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    pub family: Family,
    pub ordinal: u32,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.family {
            Family::Cuda => write!(f, "device {}", self.ordinal),
            Family::Simulated => write!(f, "simulated device {}", self.ordinal),
        }
    }
}
