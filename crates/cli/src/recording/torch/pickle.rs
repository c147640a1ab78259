//! Reads pickles that contain only data, with the opcodes that Python's `pickletools` describes. Opcodes that name or
//! call functions are rejected, and nothing is executed.
//!
//! Crates for pickles, such as `serde-pickle`, build one value from the whole file: a snapshot of 1 GB would not fit
//! into memory.

use std::io::{self, BufRead, Read};

use gpumem_core::report::counted;

use super::objects::{Objects, Value, invalid};

/// How deeply values may be nested. Python nests at most seven in snapshots.
const DEEPEST: usize = 100;
/// Names in errors are cut to this many bytes.
const LONGEST_NAME: u64 = 200;

/// The entries of the memo by number. Texts, dictionaries, lists and pairs are stored unchanged.
#[derive(Clone, Copy)]
enum Memoized {
    Nothing,
    Text(u32),
    Object(u32),
    Pair(u32, u32),
    Other,
}

/// Returns whether a file that starts with these bytes is a pickle of protocol 2 to 5.
pub(super) fn is_pickle(head: [u8; 2]) -> bool {
    matches!(head, [0x80, 2..=5])
}

/// Reads a pickle of `length` bytes, and returns its value. The dictionaries, lists and texts are put into `objects`.
///
/// # Errors
/// Returns an error if the file cannot be read. The kind is [`InvalidData`](io::ErrorKind::InvalidData) if it is not a
/// pickle, or if it contains code.
pub(super) fn read(from: impl BufRead, length: u64, objects: &mut Objects) -> io::Result<Value> {
    let (stack, marks, memo, text) = Default::default();
    let mut pickle = Pickle { from, length, at: 0, start: 0, objects, stack, marks, memo, text };
    loop {
        if let Some(value) = pickle.step()? {
            return Ok(value);
        }
    }
}

struct Pickle<'a, R> {
    from: R,
    length: u64,
    /// The number of bytes read so far.
    at: u64,
    /// The offset in the file at which the current opcode starts.
    start: u64,
    objects: &'a mut Objects,
    stack: Vec<Value>,
    /// The height of the stack at each mark.
    marks: Vec<usize>,
    memo: Vec<Memoized>,
    /// The bytes of a text.
    text: Vec<u8>,
}

impl<R: BufRead> Pickle<'_, R> {
    /// Runs the next opcode. Returns the value of the pickle if that was the last one.
    fn step(&mut self) -> io::Result<Option<Value>> {
        self.start = self.at;
        let [opcode] = self.bytes()?;
        match opcode {
            b'.' => return self.last(1).map(|at| Some(self.stack[at])),
            // PROTO and FRAME.
            0x80 => self.bytes::<1>().map(drop),
            0x95 => self.bytes::<8>().map(drop),
            b'(' if self.marks.len() == DEEPEST => self.damaged("more than 100 values are inside each other"),
            b'(' => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'N' | 0x89 | b')' => self.push(Value::Other),
            0x88 => self.push(Value::True),
            b'K' => self.bytes::<1>().and_then(|bytes| self.push(Value::Number(u8::from_le_bytes(bytes).into()))),
            b'M' => self.bytes().and_then(|bytes| self.push(Value::Number(u16::from_le_bytes(bytes).into()))),
            b'J' => self.bytes().and_then(|bytes| self.push(Value::Number(i32::from_le_bytes(bytes).into()))),
            0x8a => self.length::<1>().and_then(|length| self.long(length)),
            0x8b => self.length::<4>().and_then(|length| self.long(length)),
            b'G' => self.bytes::<8>().and_then(|_| self.push(Value::Other)),
            0x8c | b'U' => self.length::<1>().and_then(|length| self.text(length)),
            b'X' | b'T' => self.length::<4>().and_then(|length| self.text(length)),
            0x8d => self.length::<8>().and_then(|length| self.text(length)),
            b'C' => self.length::<1>().and_then(|length| self.skipped(length)),
            b'B' => self.length::<4>().and_then(|length| self.skipped(length)),
            0x8e | 0x96 => self.length::<8>().and_then(|length| self.skipped(length)),
            b'}' => {
                let dictionary = self.objects.dictionary();
                self.push_new(dictionary)
            }
            b']' => {
                let list = self.objects.list();
                self.push_new(list)
            }
            0x85..=0x87 => self.last(usize::from(opcode - 0x84)).and_then(|first| self.tuple(first)),
            b't' => self.marked().and_then(|first| self.tuple(first)),
            b'a' => self.last(1).and_then(|first| self.put(first, Objects::append)),
            b'e' => self.marked().and_then(|first| self.put(first, Objects::append)),
            b's' => self.last(2).and_then(|first| self.put(first, Objects::set)),
            b'u' => self.marked().and_then(|first| self.put(first, Objects::set)),
            0x94 => self.memoize(self.memo.len() as u64),
            b'q' => self.length::<1>().and_then(|number| self.memoize(number)),
            b'r' => self.length::<4>().and_then(|number| self.memoize(number)),
            b'h' => self.length::<1>().and_then(|number| self.get(number)),
            b'j' => self.length::<4>().and_then(|number| self.get(number)),
            opcode => self.reject(opcode),
        }?;
        Ok(None)
    }

    /// Rejects an opcode that pickles of data do not need.
    #[cold]
    fn reject<T>(&mut self, opcode: u8) -> io::Result<T> {
        let name = match opcode {
            b'c' => "GLOBAL",
            b'i' => "INST",
            0x93 => "STACK_GLOBAL",
            b'o' => "OBJ",
            b'R' => "REDUCE",
            b'b' => "BUILD",
            0x81 => "NEWOBJ",
            0x92 => "NEWOBJ_EX",
            0x82..=0x84 => "EXT",
            b'P' => "PERSID",
            b'Q' => "BINPERSID",
            opcode => return self.damaged(&format!("no snapshot has the opcode {opcode:#04x}")),
        };
        let called = match opcode {
            b'c' | b'i' => Some([self.line()?, self.line()?]),
            0x93 => match self.stack[..] {
                [.., Value::Text(module), Value::Text(name)] => {
                    Some([module, name].map(|text| self.objects.known_text(text).to_owned()))
                }
                _ => None,
            },
            _ => None,
        };
        let called = called.map_or_else(|| "code".to_owned(), |[module, name]| format!("`{module}.{name}`"));
        self.damaged(&format!("the opcode {name} would run {called}. gpumem reads data only, and has run nothing"))
    }

    /// Returns the error for a pickle that cannot be read at this opcode.
    #[cold]
    fn damaged<T>(&self, why: &str) -> io::Result<T> {
        Err(invalid(format!("byte {} of the pickle: {why}", self.start)))
    }

    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.from.read_exact(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                invalid("the pickle has no end: it is cut, or still being written".to_owned())
            }
            _ => error,
        })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Reads a number of `N` bytes, which is a length or a memo number.
    fn length<const N: usize>(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes[..N])?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Returns an error if fewer bytes than this are left in the file.
    fn check(&self, length: u64) -> io::Result<()> {
        if length <= self.length.saturating_sub(self.at) {
            Ok(())
        } else {
            let bytes = counted(length, "byte", "bytes");
            self.damaged(&format!("a value has {bytes}, which is more than the file has"))
        }
    }

    /// Reads a line of text. A long line is cut.
    fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        self.from.by_ref().take(LONGEST_NAME).read_until(b'\n', &mut line)?;
        Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
    }

    /// Reads an integer of this many bytes, the lowest byte first. The last byte contains the sign.
    fn long(&mut self, length: u64) -> io::Result<()> {
        let mut bytes = [0; 16];
        let Some(length) = usize::try_from(length).ok().filter(|length| *length <= bytes.len()) else {
            return self.skipped(length);
        };
        let (used, rest) = bytes.split_at_mut(length);
        self.fill(used)?;
        rest.fill(if used.last().is_some_and(|last| *last >= 0x80) { 0xff } else { 0 });
        let number = i128::from_le_bytes(bytes);
        // PyTorch writes addresses with and without a sign.
        let number = i64::try_from(number).or_else(|_| u64::try_from(number).map(u64::cast_signed));
        self.push(number.map_or(Value::Other, Value::Number))
    }

    fn text(&mut self, length: u64) -> io::Result<()> {
        self.check(length)?;
        let mut text = std::mem::take(&mut self.text);
        text.resize(usize::try_from(length).map_err(io::Error::other)?, 0);
        self.fill(&mut text)?;
        let value = self.objects.text(&String::from_utf8_lossy(&text));
        self.text = text;
        self.push_new(value)
    }

    /// Skips a value of this many bytes.
    fn skipped(&mut self, length: u64) -> io::Result<()> {
        self.check(length)?;
        self.at += io::copy(&mut self.from.by_ref().take(length), &mut io::sink())?;
        self.push(Value::Other)
    }

    fn push_new(&mut self, value: Result<Value, &'static str>) -> io::Result<()> {
        match value {
            Ok(value) => self.push(value),
            Err(why) => self.damaged(why),
        }
    }

    fn push(&mut self, value: Value) -> io::Result<()> {
        if self.stack.len() == self.objects.most() {
            return self.damaged("a snapshot of this size has fewer values");
        }
        self.stack.push(value);
        Ok(())
    }

    /// Returns the index of the first of the last `count` values on the stack. They must be above the last mark.
    fn last(&self, count: usize) -> io::Result<usize> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(count).filter(|first| *first >= floor) {
            Some(first) => Ok(first),
            None => self.damaged("it needs a value that does not exist"),
        }
    }

    /// Returns the index of the first value after the last mark.
    fn marked(&mut self) -> io::Result<usize> {
        self.marks.pop().map_or_else(|| self.damaged("it needs a mark that does not exist"), Ok)
    }

    fn tuple(&mut self, first: usize) -> io::Result<()> {
        let tuple = match self.stack[first..] {
            [Value::Number(one), Value::Number(other)] => {
                let pair = u32::try_from(one).ok().zip(u32::try_from(other).ok());
                pair.map_or(Value::Other, |(one, other)| Value::Pair(one, other))
            }
            // The values of other tuples are not needed.
            _ => Value::Other,
        };
        self.stack.truncate(first);
        self.push(tuple)
    }

    /// Moves the values from this index on into the list or the dictionary below them.
    fn put(
        &mut self,
        first: usize,
        put: fn(&mut Objects, u32, &[Value]) -> Result<(), &'static str>,
    ) -> io::Result<()> {
        let (below, values) = self.stack.split_at(first);
        let Some(Value::Object(to)) = below.last() else {
            return self.damaged("only lists and dictionaries get values");
        };
        put(self.objects, *to, values).or_else(|why| self.damaged(why))?;
        self.stack.truncate(first);
        Ok(())
    }

    fn memoize(&mut self, number: u64) -> io::Result<()> {
        let memoized = match self.stack.last() {
            Some(Value::Text(text)) => Memoized::Text(*text),
            Some(Value::Object(object)) => Memoized::Object(*object),
            Some(Value::Pair(one, other)) => Memoized::Pair(*one, *other),
            Some(_) => Memoized::Other,
            None => return self.damaged("it needs a value that does not exist"),
        };
        // Writers number the entries in order, and each one takes at least two bytes.
        if number > self.at / 2 {
            return self.damaged("the index of a value is too high");
        }
        let number = usize::try_from(number).map_err(io::Error::other)?;
        if number >= self.memo.len() {
            self.memo.resize(number + 1, Memoized::Nothing);
        }
        self.memo[number] = memoized;
        Ok(())
    }

    fn get(&mut self, number: u64) -> io::Result<()> {
        let memoized = usize::try_from(number).ok().and_then(|number| self.memo.get(number));
        match memoized.copied().unwrap_or(Memoized::Nothing) {
            Memoized::Nothing => self.damaged("it refers to a value that does not exist"),
            Memoized::Text(text) => self.push(Value::Text(text)),
            Memoized::Object(object) => self.push(Value::Object(object)),
            Memoized::Pair(one, other) => self.push(Value::Pair(one, other)),
            Memoized::Other => self.push(Value::Other),
        }
    }
}
