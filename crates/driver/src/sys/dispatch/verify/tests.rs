//! Tests stubs of every known form in a library with made-up addresses, and stubs with a changed bit.

use super::*;
use crate::sys::dispatch::stub::tests::Form;

const CODE: usize = 0x32_7790;
const DATA: usize = 0x5bc_a000;
const DATA_END: usize = 0x5bd_8000;
/// The address of the first slot. Some words between the slots belong to no function, and hold no pointer.
const SLOTS: usize = 0x5bc_f9e8;
const FLAG: usize = 0x5bd_5d50;
const IMPLEMENTATIONS: usize = 0x40_0000;
const STUBS: usize = 200;

/// A driver with stubs of one form. Every fifth function is intercepted.
struct Driver {
    form: Form,
    code: Vec<u8>,
}

impl Driver {
    fn new(form: Form) -> Self {
        let mut driver = Self { form, code: vec![form.filler(); STUBS * form.distance()] };
        for number in 0..STUBS {
            let at = number * form.distance();
            let stub = driver.stub(number);
            form.assemble(&mut driver.code[at..at + form.distance()], CODE + at, stub);
        }
        driver
    }

    /// Returns the expected result for the stub with this number. The slots are not in the order of their functions.
    fn stub(&self, number: usize) -> Stub {
        let (address, slot) = (CODE + number * self.form.distance(), number * 73 % STUBS);
        Stub { slot: SLOTS + (slot + slot / 5) * 8, flag: FLAG, error_path: address + self.form.error_path() }
    }

    fn functions(&self) -> Vec<(&'static str, usize)> {
        (0..STUBS).step_by(5).map(|number| ("cuFunction", CODE + number * self.form.distance())).collect()
    }

    fn verify(&self) -> Result<Vec<VerifiedStub>, String> {
        verify(self, self.form.processor(), &self.functions())
    }

    fn stubs(&self) -> Vec<Stub> {
        (0..STUBS).step_by(5).map(|number| self.stub(number)).collect()
    }
}

impl Library for Driver {
    fn code_around(&self, address: usize) -> Option<Range<usize>> {
        let segments = [CODE..CODE + self.code.len(), IMPLEMENTATIONS..DATA];
        segments.into_iter().find(|segment| segment.contains(&address))
    }

    fn is_readable(&self, address: usize, bytes: usize) -> bool {
        self.is_code(address) || (DATA..=DATA_END - bytes).contains(&address)
    }

    fn is_writable(&self, address: usize, bytes: usize) -> bool {
        (DATA..=DATA_END - bytes).contains(&address)
    }

    fn code(&self, range: Range<usize>) -> Option<Vec<u8>> {
        self.code.get(range.start.checked_sub(CODE)?..range.end.checked_sub(CODE)?).map(<[u8]>::to_vec)
    }

    /// A driver also has tables of functions that are not slots.
    fn pointer(&self, address: usize) -> Option<usize> {
        let is_pointer = address.is_multiple_of(8) && self.is_writable(address, 8);
        let is_used = match address.checked_sub(SLOTS).map(|after| after / 8) {
            Some(word) if word < STUBS / 5 * 6 => word % 6 != 5,
            _ => address < SLOTS - 0x1000 && address.is_multiple_of(32),
        };
        is_pointer.then_some(if is_used { IMPLEMENTATIONS + address - DATA } else { 0 })
    }

    fn owner(&self, _: usize) -> Option<PathBuf> {
        None
    }
}

#[test]
fn drivers_of_every_known_form_are_accepted() {
    for form in Form::all() {
        let driver = Driver::new(form);
        let read = driver.verify().unwrap_or_else(|why| panic!("{form:?}: {why}"));
        assert_eq!(read.iter().map(|found| found.stub).collect::<Vec<_>>(), driver.stubs(), "{form:?}");
        assert!(read.iter().all(|found| found.implementation == IMPLEMENTATIONS + found.stub.slot - DATA), "{form:?}");
    }
}

/// Changes each single bit.
#[test]
fn changing_any_bit_of_a_stub_is_noticed() {
    for form in Form::all() {
        for bit in 0..form.length() * 8 {
            let mut driver = Driver::new(form);
            driver.code[70 * form.distance() + bit / 8] ^= 1 << (bit % 8);
            if let Ok(read) = driver.verify() {
                let read: Vec<_> = read.iter().map(|found| found.stub).collect();
                assert_eq!(read, driver.stubs(), "{form:?}, bit {bit}");
                assert_eq!(form.processor(), Processor::Arm64, "{form:?}, bit {bit}: there is no other way to say it");
            }
        }
    }
}

#[test]
fn the_error_names_the_reason() {
    let form = Form::X86_64 { framed: true };
    let reason = |change: &dyn Fn(&mut Driver)| {
        let mut driver = Driver::new(form);
        change(&mut driver);
        driver.verify().expect_err("it is refused")
    };
    let point = |driver: &mut Driver, number: usize, stub: Stub| {
        let at = number * form.distance();
        form.assemble(&mut driver.code[at..at + form.distance()], CODE + at, stub);
    };
    let with = |number: usize, change: &dyn Fn(&mut Stub)| {
        reason(&|driver| {
            let mut stub = driver.stub(number);
            change(&mut stub);
            point(driver, number, stub);
        })
    };
    let theirs = Driver::new(form).stub(6);
    for (why, says) in [
        (reason(&|driver| driver.code[0] = 0xe9), "does not start as in the known drivers"),
        (with(5, &|stub| stub.slot += 4), "is not in the driver's writable data"),
        (with(5, &|stub| stub.slot = CODE), "is not in the driver's writable data"),
        (with(5, &|stub| stub.slot = DATA_END), "is not in the driver's writable data"),
        (with(5, &|stub| stub.slot = FLAG + 8), "leads out of the driver: another tool uses it"),
        (with(5, &|stub| stub.slot = theirs.slot), "shares its pointer with another function"),
        (with(5, &|stub| stub.slot = DATA), "is not next to other functions' pointers"),
        (with(5, &|stub| stub.flag += 4), "checks another flag than the stub of"),
        (with(5, &|stub| stub.error_path = theirs.error_path), "leads elsewhere when the driver was shut down"),
        (with(5, &|stub| stub.error_path += 1), "does not check whether the driver was shut down"),
        (with(5, &|stub| stub.flag = 8), "does not check whether the driver was shut down"),
    ] {
        assert!(why.contains(says), "{why:?} does not say {says:?}");
    }
    assert!(verify(&Driver::new(form), form.processor(), &[]).is_err());
    let nowhere = verify(&Driver::new(form), form.processor(), &[("cuInit", 0x1000)]);
    assert_eq!(nowhere, Err("cuInit is not in the driver's code".to_owned()));
}
