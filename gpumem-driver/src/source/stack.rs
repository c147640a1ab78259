//! Resolves the addresses of a stack to the frames of `model`.

use super::python;
use crate::{model::Frame, sys::stack};

/// The frames at these addresses, innermost first, including inlined functions. It is slow, so it is only for printing.
pub(super) fn frames(addresses: &[usize]) -> Vec<Frame> {
    addresses.iter().flat_map(|address| at(*address)).collect()
}

/// The frames at one address, or the line of Python with this number. If only the module is known, the frame has nothing else.
fn at(address: usize) -> Vec<Frame> {
    if let Some(frame) = python::frame(address) {
        return vec![frame];
    }
    let module = stack::module_of(address).map(|file| file.to_string_lossy().into_owned());
    let mut symbols = stack::resolve(address);
    if symbols.is_empty() {
        symbols.push(stack::Symbol::default());
    }
    let frame = |symbol: stack::Symbol| Frame {
        function: symbol.function,
        file: symbol.file.map(|file| file.to_string_lossy().into_owned()),
        line: symbol.line,
        column: symbol.column,
        module: module.clone(),
    };
    symbols.into_iter().map(frame).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{library, user_line};

    #[test]
    fn the_line_of_this_test_is_not_a_line_of_the_user() {
        let mut addresses = [0; 64];
        let count = stack::unwind(&mut addresses, 0);
        let frames = frames(&addresses[..count]);
        assert!(frames[0].file.as_ref().unwrap().ends_with("source/stack.rs"), "{frames:#?}");
        assert!(frames.iter().all(|frame| frame.module.is_some()), "{frames:#?}");
        // The tests of the library are its own code.
        let line = user_line(&frames).map(|(line, _)| line);
        assert!(line.is_none_or(|frame| frame.function.as_ref().unwrap().starts_with("test::")), "{line:#?}");
        let program = std::env::current_exe().unwrap();
        let program = program.file_name().unwrap().to_string_lossy();
        assert!(
            library(&frames).is_none_or(|library| library == program || library.starts_with("libc")),
            "{frames:#?}"
        );
    }

    #[test]
    fn an_unknown_address_is_an_empty_frame() {
        assert_eq!(frames(&[1]), [Frame::default()]);
    }
}
