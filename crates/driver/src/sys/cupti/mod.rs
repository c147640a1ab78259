//! CUPTI's callback interface. CUPTI calls back before and after each driver call that allocates or frees, on the thread
//! that makes the call.

mod abi;
mod decode;
mod library;
mod subscription;

pub(crate) use self::{
    library::{check_available, device_of, version},
    subscription::{subscribe, subscribed, unsubscribe},
};
