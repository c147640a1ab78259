//! Reads the pickles that the command writes.

use std::{cell::RefCell, rc::Rc};

use serde_json::Value;

/// A value on the stack of a pickle. Memoized values are shared.
#[derive(Clone, Debug)]
enum Pickled {
    Number(u64),
    Text(String),
    List(Rc<RefCell<Vec<Pickled>>>),
    Dictionary(Rc<RefCell<Vec<Pickled>>>),
}

impl Pickled {
    fn json(&self) -> Value {
        match self {
            Self::Number(number) => (*number).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(all) => all.borrow().iter().map(Self::json).collect(),
            Self::Dictionary(all) => {
                let pair = |pair: &[Self]| (pair[0].json().as_str().unwrap().to_owned(), pair[1].json());
                Value::Object(all.borrow().chunks(2).map(pair).collect())
            }
        }
    }
}

/// Reads a pickle, as Python's `pickletools` describes the codes.
pub(crate) fn unpickled(mut bytes: &[u8]) -> Value {
    let (mut stack, mut marks, mut memo): (Vec<Pickled>, Vec<usize>, Vec<Pickled>) = Default::default();
    let mut take = |count: usize| {
        let (taken, rest) = bytes.split_at(count);
        bytes = rest;
        taken
    };
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    let index = |bytes: &[u8]| usize::try_from(number(bytes)).unwrap();
    assert_eq!(take(2), [0x80, 4]);
    loop {
        match take(1)[0] {
            b'.' => break,
            b'(' => marks.push(stack.len()),
            b'}' => stack.push(Pickled::Dictionary(Rc::default())),
            b']' => stack.push(Pickled::List(Rc::default())),
            b'K' => stack.push(Pickled::Number(number(take(1)))),
            b'J' => stack.push(Pickled::Number(number(take(4)))),
            0x8a => {
                let length = index(take(1));
                let bytes = take(length);
                assert!(*bytes.last().unwrap() < 0x80, "it would be below 0");
                stack.push(Pickled::Number(number(bytes)));
            }
            b'X' => {
                let length = index(take(4));
                stack.push(Pickled::Text(String::from_utf8(take(length).to_vec()).unwrap()));
            }
            0x94 => memo.push(stack.last().unwrap().clone()),
            b'h' => stack.push(memo[index(take(1))].clone()),
            b'j' => stack.push(memo[index(take(4))].clone()),
            code @ (b'e' | b'u') => {
                let values = stack.split_off(marks.pop().unwrap());
                assert!(values.len() <= 1000, "the web viewer can add only so many at once");
                match (code, stack.last().unwrap()) {
                    (b'e', Pickled::List(all)) | (b'u', Pickled::Dictionary(all)) => all.borrow_mut().extend(values),
                    other => panic!("{other:?}"),
                }
            }
            other => panic!("code {other:#x}"),
        }
    }
    let [only] = stack.as_slice() else { panic!("{stack:?}") };
    only.json()
}
