//! Compares programs' stacks with the system unwinder's.

use std::{
    cell::RefCell,
    env,
    ffi::{CString, c_int, c_void},
    fs,
    hint::black_box,
    mem::{self, transmute},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    process::{self, Command},
    ptr,
    sync::atomic::{
        AtomicBool, AtomicUsize,
        Ordering::{Relaxed, SeqCst},
    },
    thread,
};

use super::*;
use crate::sys::stack::{self, unwind};

/// Calls itself `depth` times; `black_box` prevents a tail call.
#[inline(never)]
fn deeper<R>(depth: usize, at_the_bottom: &mut dyn FnMut() -> R) -> R {
    let result = match depth {
        0 => at_the_bottom(),
        _ => deeper(depth - 1, at_the_bottom),
    };
    black_box(());
    result
}

thread_local! {
    /// The walked stacks, by id.
    static WALKED: RefCell<Vec<Vec<usize>>> = const { RefCell::new(Vec::new()) };
}

fn add(stack: &[usize]) -> u32 {
    WALKED.with_borrow_mut(|walked| {
        walked.push(stack.to_vec());
        u32::try_from(walked.len() - 1).unwrap()
    })
}

/// Returns the calling thread's stack, and whether this call walked it.
fn known() -> Option<(Vec<usize>, bool)> {
    let before = WALKED.with_borrow(Vec::len);
    let number = number(|_| false, add)?;
    WALKED.with_borrow(|walked| Some((walked[number as usize].clone(), walked.len() > before)))
}

/// Compares our stack with the system unwinder's. Returns the number of functions, and whether ours was walked.
#[inline(never)]
fn compare() -> (usize, bool) {
    let (ours, is_walked) = known().expect("all functions here have tables");
    let mut theirs = [0; 1024];
    let count = unwind(&mut theirs, 0);
    // The calls of the two walks are on different lines of this function.
    let theirs = &theirs[1..count];
    let common = ours.iter().position(|address| *address == theirs[0]).expect("the caller is on both");
    assert!(common < 6, "{common} functions further inside");
    let shared = &ours[common..];
    assert_eq!(shared, &theirs[..theirs.len().min(shared.len())]);
    assert!(shared.len() == theirs.len() || ours.len() == MAX_FUNCTIONS, "{} of {}", shared.len(), theirs.len());
    (shared.len(), is_walked)
}

#[test]
fn the_walk_equals_that_of_the_system_s_unwinder() {
    let (here, _) = compare();
    assert!(here > 3);
    for depth in 0..60 {
        let (deep, is_walked) = deeper(depth, &mut compare);
        assert!(deep > here + depth && is_walked, "{deep} functions at {depth}, {here} here");
    }
    assert!(deeper(200, &mut compare).0 > 120);
}

#[test]
fn a_stack_is_walked_once() {
    let is_walked: Vec<bool> = (0..black_box(5)).map(|_| compare().1).collect();
    assert_eq!(is_walked, [true, false, false, false, false]);
    let deep: Vec<bool> = (0..black_box(4)).map(|_| deeper(40, &mut compare).1).collect();
    assert_eq!(deep, [true, false, false, false]);
}

#[test]
fn callers_are_distinguished() {
    #[inline(never)]
    fn one_of_two(path: u32, depth: usize) -> (usize, bool) {
        // The calls are separate for the compiler.
        match (depth, path & 1) {
            (0, _) => black_box(compare()),
            (_, 0) => black_box(one_of_two(path >> 1, depth - 1)),
            _ => {
                let (count, is_walked) = one_of_two(path >> 1, depth - 1);
                (black_box(count), is_walked)
            }
        }
    }
    // The calls alternate, so that each follows the others at the same stack pointer. There are more of them than a set has
    // entries.
    let mut walked = 0;
    for round in 0..40 {
        for path in 0..32 {
            walked += usize::from(one_of_two(path, 5).1);
            assert!(round > 0 || walked == path as usize + 1, "{path} was mistaken for another one");
        }
    }
    let few: usize = (0..400).map(|turn| usize::from(one_of_two(turn % 8, 5).1)).sum();
    assert!(few <= 8, "{few} were walked of 8");
}

#[test]
fn through_c_and_on_other_threads() {
    extern "C" fn order(_: *const c_void, _: *const c_void) -> c_int {
        assert!(deeper(70, &mut compare).0 > 72);
        0
    }

    let sort = || {
        let mut numbers = [2_u64, 1];
        // SAFETY: the count and the size describe the array, and `order` reads no element.
        unsafe { libc::qsort(numbers.as_mut_ptr().cast(), 2, 8, Some(order)) };
    };
    sort();
    thread::spawn(sort).join().unwrap();
    let small = thread::Builder::new().stack_size(64 << 10);
    small.spawn(|| assert!(compare().0 > 2)).unwrap().join().unwrap();
}

/// Loads a library that calls a callback: a copy of the library with the system's unwinder.
struct LoadedCopy(*mut c_void, PathBuf);

impl LoadedCopy {
    fn load(name: &str) -> Self {
        let unwinder = stack::module_of(libc_unwind as *const () as usize + 1).expect("it is a library");
        let file = env::temp_dir().join(format!("gpumem-{}-{name}.so", process::id()));
        fs::copy(unwinder, &file).unwrap();
        let path = CString::new(file.as_os_str().as_bytes()).unwrap();
        // SAFETY: loading the copy does the same as loading the original, which is loaded already.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null());
        Self(library, file)
    }

    /// Returns the address of the function that [`call`](Self::call) calls.
    fn function(&self) -> *mut c_void {
        // SAFETY: the library is loaded, and the name is a string.
        let symbol = unsafe { libc::dlsym(self.0, c"_Unwind_Backtrace".as_ptr()) };
        assert!(!symbol.is_null());
        symbol
    }

    fn call(&self, mut callback: impl FnMut()) {
        type Callback = extern "C" fn(*mut c_void, *mut c_void) -> c_int;
        extern "C" fn each<F: FnMut()>(_: *mut c_void, callback: *mut c_void) -> c_int {
            // SAFETY: it is the pointer that is passed below.
            unsafe { (*callback.cast::<F>())() };
            4
        }
        fn of<F: FnMut()>(_: &F) -> Callback {
            each::<F>
        }
        let each = of(&callback);
        // SAFETY: this is its signature. The callback returns 4, which ends the walk, so it is called once, on this thread.
        unsafe {
            let walk: unsafe extern "C" fn(Callback, *mut c_void) -> c_int = transmute(self.function());
            walk(each, (&raw mut callback).cast());
        }
    }
}

impl Drop for LoadedCopy {
    fn drop(&mut self) {
        // SAFETY: nothing of it is used any more.
        unsafe { libc::dlclose(self.0) };
        let _ = fs::remove_file(&self.1);
    }
}

unsafe extern "C" {
    #[link_name = "_Unwind_Backtrace"]
    fn libc_unwind();
}

#[test]
fn a_stack_of_an_unloaded_library_is_not_reused() {
    let mut library = None;
    let twice = [true, false];
    let known = [false, false];
    for (step, expected) in [
        ("begin", twice),
        // Loading a library does not affect other stacks, and the library's own functions can be walked immediately.
        ("load", known),
        ("call", known),
        // Another library may be loaded at the same addresses next. The next walk notices that this one was unloaded.
        ("unload", known),
        ("walk", twice),
        ("load", known),
        ("call", known),
        ("call", known),
    ] {
        match step {
            "load" => library = Some(LoadedCopy::load("late")),
            "unload" => library = None,
            "walk" => assert!(deeper(6, &mut compare).1),
            "call" => {
                let library = library.as_ref().expect("it is loaded");
                let mut seen = Vec::new();
                (0..black_box(3)).for_each(|_| library.call(|| seen.push(compare())));
                assert!(seen[0].0 > 3, "{seen:?}");
                assert_eq!(seen[1..].iter().map(|seen| seen.1).collect::<Vec<_>>(), [false, false]);
            }
            _ => {}
        }
        let seen: Vec<bool> = (0..black_box(2)).map(|_| deeper(5, &mut compare).1).collect();
        assert_eq!(seen, expected, "after {step}");
    }
}

/// A report looks up the file and the function of an address whose library is unloaded at this moment.
#[test]
fn libraries_are_unloaded_while_reports_are_made() {
    // The number of the round. 0 while no library is known to be at the address.
    let (round_now, address, is_done) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    let known = [const { AtomicUsize::new(0) }; 2];
    let report = || {
        while !is_done.load(SeqCst) {
            let round = round_now.load(SeqCst);
            let address = address.load(SeqCst);
            let (file, symbols) = (stack::module_of(address + 1), stack::resolve(address + 1));
            if let Some(file) = file {
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                assert!(name.starts_with("gpumem-") && name.ends_with(".so"), "{file:?}");
                known[0].fetch_add(1, Relaxed);
            }
            if round == 0 || round_now.load(SeqCst) != round {
                continue;
            }
            for symbol in symbols {
                assert_eq!(symbol.function.as_deref(), Some("_Unwind_Backtrace"));
                known[1].fetch_add(1, Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        let reporters = [(); 2].map(|()| scope.spawn(report));
        for round in 1..=1000 {
            let library = LoadedCopy::load(&format!("unloaded{round}"));
            address.store(library.function().addr(), SeqCst);
            round_now.store(round, SeqCst);
            thread::yield_now();
            round_now.store(0, SeqCst);
        }
        is_done.store(true, SeqCst);
        for reporter in reporters {
            reporter.join().unwrap();
        }
    });
    let known = known.map(AtomicUsize::into_inner);
    assert!(known.iter().all(|known| *known > 10), "{known:?}");
}

/// Libraries are mapped a few pages below a library that was unloaded but is still in the list of `backtrace`.
#[test]
fn a_library_has_its_own_functions_where_another_one_was() {
    const NAME: &str = "sys::walker::tests::a_library_has_its_own_functions_where_another_one_was";
    const PAGES: usize = 8;
    // `backtrace` creates its list once per process.
    if env::var_os("GPUMEM_TEST_ALONE").is_none() {
        let program = env::current_exe().unwrap();
        let alone = Command::new(program).args(["--exact", NAME]).env("GPUMEM_TEST_ALONE", "1").output().unwrap();
        let said = String::from_utf8_lossy(&alone.stdout);
        assert!(
            alone.status.success() && said.contains("1 passed"),
            "{said}{}",
            String::from_utf8_lossy(&alone.stderr)
        );
        return;
    }
    let function_of = |library: &LoadedCopy| stack::resolve(library.function().addr() + 1).pop()?.function;
    // SAFETY: the memory is new, and nothing uses it.
    let take = |address: usize, bytes| unsafe {
        let requested = ptr::without_provenance_mut(address);
        libc::mmap(requested, bytes, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    // Unloads a library, and maps a page over the end of its address range. The loader maps the next library one page lower.
    let leave = |library: LoadedCopy| {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let last = maps.lines().rfind(|line| line.contains(library.1.to_str().unwrap())).unwrap();
        let end = usize::from_str_radix(last.split(['-', ' ']).nth(1).unwrap(), 16).unwrap();
        drop(library);
        take(end - 4096, 4096);
    };
    // The first libraries may be mapped into gaps between other files.
    (0..3).for_each(|round| leave(LoadedCopy::load(&format!("{round}"))));
    let first = LoadedCopy::load("first");
    let before = first.function().addr();
    // `backtrace` maps files. These pages keep the addresses below the library free of them.
    let base = stack::files_of(&[before + 1]).pop().flatten().unwrap().base;
    let below = take(base - PAGES * 4096, PAGES * 4096);
    assert_eq!(function_of(&first).as_deref(), Some("_Unwind_Backtrace"));
    leave(first);
    // SAFETY: nothing uses it.
    assert_eq!(unsafe { libc::munmap(below, PAGES * 4096) }, 0);
    let mut distances = Vec::new();
    for page in 1..=PAGES {
        let other = LoadedCopy::load(&format!("other{page}"));
        distances.push(before.wrapping_sub(other.function().addr()));
        assert_eq!(function_of(&other).as_deref(), Some("_Unwind_Backtrace"), "{distances:x?}");
        leave(other);
    }
    assert!(distances.iter().any(|bytes| (1..=PAGES * 4096).contains(bytes)), "no library lies there: {distances:x?}");
}

#[test]
fn a_cached_stack_allocates_nothing_and_a_thread_allocates_little() {
    compare();
    let of_thread = thread::spawn(|| {
        let first = allocation_counter::measure(|| assert_eq!(number(|_| false, |_| 7), Some(7)));
        for _ in 0..2 {
            let next = allocation_counter::measure(|| {
                deeper(40, &mut || assert_eq!(number(|_| false, |_| 7), Some(7)));
            });
            assert_eq!(next.count_total, 0);
        }
        first.bytes_current
    });
    let bytes = of_thread.join().unwrap();
    assert!(bytes > 0 && bytes <= 64 << 10, "{bytes} bytes");
}

/// Runs a function on a stack that is not the thread's.
fn on_another_stack(elsewhere: extern "C" fn()) {
    let mut room = vec![0_u8; 256 << 10];
    // SAFETY: the contexts are initialized before they are used, and live until both have returned; the stack is large enough.
    unsafe {
        let (mut own, mut other): (libc::ucontext_t, libc::ucontext_t) = (mem::zeroed(), mem::zeroed());
        assert_eq!(libc::getcontext(&raw mut other), 0);
        other.uc_stack.ss_sp = room.as_mut_ptr().cast();
        other.uc_stack.ss_size = room.len();
        other.uc_link = &raw mut own;
        libc::makecontext(&raw mut other, elsewhere, 0);
        assert_eq!(libc::swapcontext(&raw mut own, &raw const other), 0);
    }
}

#[test]
fn another_stack_than_the_thread_s_is_not_walked() {
    thread_local! {
        static SEEN: RefCell<Option<(bool, usize)>> = const { RefCell::new(None) };
    }
    extern "C" fn elsewhere() {
        let words = || WALKER.with_borrow(|walker| walker.as_ref().map(|walker| walker.cache.words_ever()));
        let before = words();
        let is_known = number(|_| false, |_| 7).is_some() || words() != before;
        let count = RefCell::new(0);
        stack::number(
            |_| false,
            |stack| {
                *count.borrow_mut() = stack.len();
                7
            },
        );
        SEEN.set(Some((is_known, count.into_inner())));
    }

    assert_eq!(number(|_| false, |_| 7), Some(7));
    on_another_stack(elsewhere);
    let (is_known, count) = SEEN.take().expect("it ran");
    assert!(!is_known && count > 0, "{count} functions");
}

#[test]
fn while_the_locals_of_a_thread_are_destroyed() {
    struct WalkOnDrop;

    impl Drop for WalkOnDrop {
        fn drop(&mut self) {
            assert_eq!(number(|_| false, |_| 7), None);
            assert_eq!(stack::number(|_| false, |stack| u32::from(!stack.is_empty())), 1);
        }
    }

    thread_local! {
        static LATE: RefCell<Option<WalkOnDrop>> = const { RefCell::new(None) };
    }
    let thread = thread::spawn(|| {
        // Thread-locals are destroyed in the reverse order of their first use.
        LATE.set(Some(WalkOnDrop));
        assert_eq!(number(|_| false, |_| 7), Some(7));
    });
    // A panic in a destructor of a thread-local would abort the process.
    thread.join().unwrap();
}

#[test]
fn functions_of_files_that_are_left_out_are_not_recorded() {
    let recorded = |stack: &[(u64, bool)]| {
        let mut functions = Functions { addresses: [0; MAX_FUNCTIONS], count: 0, has_skipped: false };
        let added = stack.iter().take_while(|(address, is_skipped)| {
            functions.add(&WalkedFrame { address: *address, is_skipped: *is_skipped })
        });
        (added.count(), functions.addresses[..functions.count].to_vec())
    };
    let (user, driver) = (false, true);
    assert_eq!(recorded(&[(1, user), (2, user), (3, user)]), (3, vec![1, 2, 3]));
    // Our callback, the driver, the user, the driver again, and a function of the user that the driver calls.
    let nested = [(1, user), (2, user), (3, driver), (4, driver), (5, user), (6, user), (7, driver), (8, user)];
    assert_eq!(recorded(&nested), (8, vec![5, 6, 8]));
    assert_eq!(recorded(&[(1, user), (2, driver)]), (2, vec![]));
    // The driver's functions do not count towards the limit.
    let deep = |driver_s: u64, users: u64| -> Vec<_> {
        (1..=driver_s).map(|at| (at, driver)).chain((1000..1000 + users).map(|at| (at, user))).collect()
    };
    assert_eq!(recorded(&deep(100, 127)), (227, (1000..1127).collect()));
    assert_eq!(recorded(&deep(100, 200)), (227, (1000..1128).collect()));
}

/// Returns the return address in the library that calls back, in a list, and whether a walk found it.
fn known_caller(library: &LoadedCopy, is_skipped: fn(&[u8]) -> bool) -> Option<(Vec<usize>, bool)> {
    let before = WALKED.with_borrow(Vec::len);
    let mut number = None;
    library.call(|| number = caller(is_skipped, |address| add(&[address])));
    WALKED.with_borrow(|walked| Some((walked[number? as usize].clone(), walked.len() > before)))
}

#[test]
fn the_caller_is_known_from_every_depth_and_forgotten_with_its_library() {
    let library = LoadedCopy::load("caller");
    let (first, is_walked) = known_caller(&library, |_| false).expect("all functions here have tables");
    let file = stack::module_of(first[0]).expect("it is in the library");
    assert!(first.len() == 1 && file == library.1 && is_walked, "{first:x?} {file:?}");
    for depth in 0..60 {
        let again = deeper(depth, &mut || known_caller(&library, |_| false));
        assert_eq!(again, Some((first.clone(), false)), "from depth {depth}");
    }
    let mut allocations = Vec::new();
    // Only the first call at this place walks.
    (0..black_box(2)).for_each(|_| {
        let call = || _ = caller(|_| false, |_| 7);
        library.call(|| allocations.push(allocation_counter::measure(call).count_total));
    });
    assert_eq!(allocations[1], 0, "{allocations:?}");
    drop(library);
    // The next walk notices that the library was unloaded. Another one may be at its place.
    assert!(deeper(7, &mut compare).1);
    let library = LoadedCopy::load("next_caller");
    let (second, is_walked) = known_caller(&library, |_| false).expect("all functions here have tables");
    assert!(stack::module_of(second[0]).is_some_and(|file| file == library.1) && is_walked, "{second:x?}");
}

#[test]
fn a_caller_is_outside_of_this_file_and_of_those_that_are_left_out() {
    extern "C" fn elsewhere() {
        assert_eq!(caller(|_| false, |_| 7), None);
    }

    let of_thread = || {
        let library = LoadedCopy::load("skipped");
        let is_copy = |file: &[u8]| file.ends_with(b"-skipped.so");
        let (outer, _) = known_caller(&library, is_copy).expect("the thread began in the C library");
        stack::module_of(outer[0]).expect("it is a file")
    };
    let file = thread::spawn(of_thread).join().unwrap();
    assert!(file.file_name().unwrap().to_string_lossy().starts_with("libc.so"), "{file:?}");
    on_another_stack(elsewhere);
}
