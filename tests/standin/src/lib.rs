//! Stand-in driver.
