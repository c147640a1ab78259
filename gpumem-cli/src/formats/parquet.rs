//! Two tables: one row for each event, and one for each block; a third one of PyTorch's tensors. Their columns name the recording and
//! the process, so that the files of a fleet can be queried together.

use std::{
    fs,
    io::{self, Write},
    iter,
    path::Path,
    sync::Arc,
};

use parquet::{
    basic::{Compression, ConvertedType, Repetition, Type as Physical},
    data_type::{BoolType, ByteArray, ByteArrayType, Int32Type, Int64Type},
    errors::Result,
    file::{
        properties::WriterProperties,
        writer::{SerializedFileWriter, SerializedRowGroupWriter},
    },
    schema::types::Type,
};

use crate::{
    history::{BlockLife, Change, ChangeKind, History, LIVE, Origin, tensor_blocks::TensorBlocks, tensors::Tensors},
    report::tensors::NO_LINE,
};

/// This many rows are written at once.
const ROWS: usize = 1 << 17;

/// A column: its name, and the values of some rows.
enum Column {
    Numbers(&'static str, Vec<i64>),
    SmallNumbers(&'static str, Vec<i32>),
    /// `None` is null.
    OptionalNumbers(&'static str, Vec<Option<i64>>),
    Texts(&'static str, Vec<ByteArray>),
    OptionalTexts(&'static str, Vec<Option<ByteArray>>),
    Flags(&'static str, Vec<bool>),
}

impl Column {
    fn schema(&self) -> Result<Type> {
        let (name, physical, is_text, is_optional) = match self {
            Self::Numbers(name, _) => (name, Physical::INT64, false, false),
            Self::SmallNumbers(name, _) => (name, Physical::INT32, false, false),
            Self::OptionalNumbers(name, _) => (name, Physical::INT64, false, true),
            Self::Texts(name, _) => (name, Physical::BYTE_ARRAY, true, false),
            Self::OptionalTexts(name, _) => (name, Physical::BYTE_ARRAY, true, true),
            Self::Flags(name, _) => (name, Physical::BOOLEAN, false, false),
        };
        let repetition = if is_optional { Repetition::OPTIONAL } else { Repetition::REQUIRED };
        let converted = if is_text { ConvertedType::UTF8 } else { ConvertedType::NONE };
        Type::primitive_type_builder(name, physical).with_repetition(repetition).with_converted_type(converted).build()
    }

    fn write<W: Write + Send>(&self, rows: &mut SerializedRowGroupWriter<'_, W>) -> Result<()> {
        fn levels<T: Clone>(values: &[Option<T>]) -> (Vec<T>, Vec<i16>) {
            let levels = values.iter().map(|value| i16::from(value.is_some())).collect();
            (values.iter().flatten().cloned().collect(), levels)
        }
        let Some(mut column) = rows.next_column()? else { return Ok(()) };
        match self {
            Self::Numbers(_, values) => column.typed::<Int64Type>().write_batch(values, None, None),
            Self::SmallNumbers(_, values) => column.typed::<Int32Type>().write_batch(values, None, None),
            Self::OptionalNumbers(_, values) => {
                let (values, levels) = levels(values);
                column.typed::<Int64Type>().write_batch(&values, Some(&levels), None)
            }
            Self::Texts(_, values) => column.typed::<ByteArrayType>().write_batch(values, None, None),
            Self::OptionalTexts(_, values) => {
                let (values, levels) = levels(values);
                column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None)
            }
            Self::Flags(_, values) => column.typed::<BoolType>().write_batch(values, None, None),
        }?;
        column.close()
    }
}

/// What a recording's rows have in common, and the texts of its origins.
struct Words {
    recording: ByteArray,
    pid: i64,
    actions: Vec<(ChangeKind, ByteArray)>,
    origins: Vec<OriginWords>,
}

struct OriginWords {
    kind: ByteArray,
    is_on_device: bool,
    scope: ByteArray,
    place: ByteArray,
    line: Option<ByteArray>,
    caller: Option<ByteArray>,
    library: Option<ByteArray>,
}

/// Where tensors come from.
struct TensorPlace {
    /// The line, or what stands in its place.
    shown: ByteArray,
    line: Option<ByteArray>,
    caller: Option<ByteArray>,
}

impl TensorPlace {
    fn new(origin: &Origin) -> Self {
        let line = origin.line.as_deref().map(text);
        let caller = origin.caller.as_deref().map(text);
        Self { shown: line.clone().unwrap_or_else(|| text(NO_LINE)), line, caller }
    }
}

fn text(text: &str) -> ByteArray {
    ByteArray::from(text.as_bytes().to_vec())
}

impl Words {
    fn new(history: &History) -> Self {
        let optional = |words: &Option<String>| words.as_deref().map(text);
        let origin = |origin: &Origin| OriginWords {
            kind: text(origin.kind.name()),
            is_on_device: origin.kind.is_on_device(),
            scope: text(&origin.scope()),
            place: text(&origin.place()),
            line: optional(&origin.line),
            caller: optional(&origin.caller),
            library: optional(&origin.library),
        };
        let name = history.path.file_stem().unwrap_or_default().to_string_lossy();
        Self {
            recording: text(&name),
            pid: history.definitions().process().pid.into(),
            actions: ChangeKind::ALL.map(|kind| (kind, text(kind.name()))).to_vec(),
            origins: history.origins.iter().map(origin).collect(),
        }
    }
}

/// Writes `NAME.events.parquet` and `NAME.blocks.parquet` into a folder, by the name of the recording, and `NAME.tensors.parquet` if it has
/// tensors. These are a part of the blocks: in a table of their own, no sum counts them twice.
pub(crate) fn write(history: &History, folder: &Path) -> io::Result<()> {
    let words = Words::new(history);
    super::texts::check_texts(history, |origin| {
        let OriginWords { scope, place, .. } = &words.origins[origin as usize];
        scope.len() + place.len()
    })?;
    fs::create_dir_all(folder)?;
    let mut live = vec![0_i64; history.devices.len()];
    let events = (0..history.lives.change_count()).step_by(ROWS).map(|first| {
        let rows: Vec<_> = history.lives.changes_from(first).take(ROWS).collect();
        events(history, &words, &rows, first, &mut live)
    });
    let name = history.path.file_stem().unwrap_or_default().to_string_lossy();
    write_table(&folder.join(format!("{name}.events.parquet")), events, || {
        self::events(history, &words, &[], 0, &mut [])
    })?;
    let blocks = (0_u32..).step_by(ROWS).take(history.lives.block_count().div_ceil(ROWS)).map(|first| {
        let rows: Vec<_> = history.lives.blocks_from(first).take(ROWS).map(|(_, block)| block).collect();
        blocks(history, &words, &rows, first as usize)
    });
    write_table(&folder.join(format!("{name}.blocks.parquet")), blocks, || self::blocks(history, &words, &[], 0))?;
    let path = folder.join(format!("{name}.tensors.parquet"));
    match history.tensors.as_ref().filter(|tensors| tensors.missing.is_none()) {
        Some(tensors) => write_tensors(tensors, &words, &path),
        // The file may be that of an earlier recording of this name.
        None => fs::remove_file(&path).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        }),
    }
}

fn write_tensors(tensors: &Tensors, words: &Words, path: &Path) -> io::Result<()> {
    let blocks = tensors.blocks();
    let places: Vec<_> = tensors.origins.iter().map(TensorPlace::new).collect();
    let is_tensor = |(_, block): &(u32, BlockLife)| block.origin != tensors.segment_origin();
    let mut rest = blocks.lives.blocks().filter(is_tensor).peekable();
    let parts = iter::from_fn(|| {
        rest.peek()?;
        let rows: Vec<_> = rest.by_ref().take(ROWS).collect();
        Some(tensor_rows(tensors, &blocks, words, &places, &rows))
    });
    write_table(path, parts, || tensor_rows(tensors, &blocks, words, &places, &[]))
}

/// A table; `empty` has its columns without rows.
fn write_table(
    path: &Path,
    parts: impl Iterator<Item = Vec<Column>>,
    empty: impl FnOnce() -> Vec<Column>,
) -> io::Result<()> {
    let columns = empty().iter().map(|column| column.schema().map(Arc::new)).collect::<Result<Vec<_>>>();
    let schema = columns.and_then(|columns| Type::group_type_builder("schema").with_fields(columns).build());
    let properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_created_by(concat!("gpumem ", env!("CARGO_PKG_VERSION")).to_owned())
        .build();
    let schema = Arc::new(schema.map_err(io::Error::other)?);
    let unfinished = path.with_extension("unfinished");
    let file = fs::File::create(&unfinished)?;
    let written =
        SerializedFileWriter::new(io::BufWriter::new(file), schema, Arc::new(properties)).and_then(|mut writer| {
            for part in parts {
                let mut rows = writer.next_row_group()?;
                part.iter().try_for_each(|column| column.write(&mut rows))?;
                rows.close()?;
            }
            writer.close()
        });
    written.map_err(io::Error::other).and_then(|_| fs::rename(&unfinished, path)).inspect_err(|_| {
        _ = fs::remove_file(&unfinished);
    })
}

fn signed(number: u64) -> i64 {
    number.cast_signed()
}

fn device(history: &History, block: &BlockLife) -> i32 {
    history.devices[usize::from(block.device)].device.ordinal.cast_signed()
}

/// `first` is the number of the first of these changes, `live` what each device has before it.
fn events(history: &History, words: &Words, rows: &[Change], first: usize, live: &mut [i64]) -> Vec<Column> {
    let block = |change: &Change| history.lives.block(change.block);
    let origin = |change: &Change| &words.origins[block(change).origin as usize];
    let action = |change: &Change| {
        words.actions.iter().find(|(kind, _)| *kind == change.kind).map(|(_, name)| name.clone()).unwrap_or_default()
    };
    let whole_from = history.whole_from();
    // `None` if it is not in the recording.
    let in_use = (first..).zip(rows).map(|(at, change)| {
        let block = block(change);
        let peak_at = history.devices[usize::from(block.device)].peak_at;
        let is_known = whole_from.map_or(peak_at.is_some_and(|peak| peak as usize == at), |first| first <= at);
        let live = &mut live[usize::from(block.device)];
        if history.origin(&block).kind.is_on_device() {
            *live += change.delta;
        }
        is_known.then_some(*live)
    });
    let in_use = in_use.collect();
    vec![
        Column::Texts("recording", rows.iter().map(|_| words.recording.clone()).collect()),
        Column::Numbers("pid", rows.iter().map(|_| words.pid).collect()),
        Column::Numbers("number", rows.iter().map(|change| signed(change.number)).collect()),
        Column::Numbers("time_ns", rows.iter().map(|change| signed(change.time)).collect()),
        Column::Texts("action", rows.iter().map(action).collect()),
        Column::SmallNumbers("device", rows.iter().map(|change| device(history, &block(change))).collect()),
        Column::Numbers("address", rows.iter().map(|change| signed(block(change).key)).collect()),
        Column::Numbers("change_bytes", rows.iter().map(|change| change.delta).collect()),
        Column::OptionalNumbers("live_bytes", in_use),
        Column::Texts("kind", rows.iter().map(|change| origin(change).kind.clone()).collect()),
        Column::Flags("is_on_device", rows.iter().map(|change| origin(change).is_on_device).collect()),
        Column::SmallNumbers("thread", rows.iter().map(|change| change.thread.into()).collect()),
        Column::Texts("scope", rows.iter().map(|change| origin(change).scope.clone()).collect()),
        Column::Texts("place", rows.iter().map(|change| origin(change).place.clone()).collect()),
        Column::OptionalTexts("library", rows.iter().map(|change| origin(change).library.clone()).collect()),
    ]
}

fn blocks(history: &History, words: &Words, rows: &[BlockLife], first: usize) -> Vec<Column> {
    let origin = |block: &BlockLife| &words.origins[block.origin as usize];
    let freed = |block: &BlockLife| (block.died != LIVE).then(|| signed(history.time_of(block.died)));
    let is_at_peak = |block: &BlockLife| {
        let peak = history.devices[usize::from(block.device)].peak_at;
        peak.is_some_and(|peak| block.is_live_after(peak))
    };
    let label = |number: usize| {
        let label = u32::try_from(number).ok().and_then(|number| history.labels.get(&number));
        label.map(|label| text(label))
    };
    vec![
        Column::Texts("recording", rows.iter().map(|_| words.recording.clone()).collect()),
        Column::Numbers("pid", rows.iter().map(|_| words.pid).collect()),
        Column::SmallNumbers("device", rows.iter().map(|block| device(history, block)).collect()),
        Column::Numbers("address", rows.iter().map(|block| signed(block.key)).collect()),
        Column::Numbers("bytes", rows.iter().map(|block| signed(block.bytes)).collect()),
        Column::Texts("kind", rows.iter().map(|block| origin(block).kind.clone()).collect()),
        Column::Numbers("allocated_ns", rows.iter().map(|block| signed(history.time_of(block.born))).collect()),
        Column::OptionalNumbers("freed_ns", rows.iter().map(freed).collect()),
        Column::Flags("is_on_device", rows.iter().map(|block| origin(block).is_on_device).collect()),
        Column::Flags("is_live_at_peak", rows.iter().map(is_at_peak).collect()),
        Column::Texts("scope", rows.iter().map(|block| origin(block).scope.clone()).collect()),
        Column::Texts("place", rows.iter().map(|block| origin(block).place.clone()).collect()),
        Column::OptionalTexts("line", rows.iter().map(|block| origin(block).line.clone()).collect()),
        Column::OptionalTexts("caller", rows.iter().map(|block| origin(block).caller.clone()).collect()),
        Column::OptionalTexts("library", rows.iter().map(|block| origin(block).library.clone()).collect()),
        Column::OptionalTexts("label", (first..first + rows.len()).map(label).collect()),
    ]
}

/// `rows` are tensors, with their numbers among the blocks.
fn tensor_rows(
    tensors: &Tensors,
    blocks: &TensorBlocks,
    words: &Words,
    places: &[TensorPlace],
    rows: &[(u32, BlockLife)],
) -> Vec<Column> {
    let step = |number: u32| blocks.steps[number as usize];
    let device = |block: &BlockLife| &tensors.devices[usize::from(block.device)];
    let place = |block: &BlockLife| &places[block.origin as usize];
    let time = |change: u32| signed(blocks.lives.change(change).time);
    let is_at_peak =
        |block: &BlockLife| blocks.peaks[usize::from(block.device)].is_some_and(|peak| block.is_live_after(peak));
    // When a tensor came that is older than the history is not known.
    let allocated = |(number, block): &(u32, BlockLife)| {
        let is_known = step(*number) >= device(block).older_count();
        is_known.then(|| time(block.born))
    };
    vec![
        Column::Texts("recording", rows.iter().map(|_| words.recording.clone()).collect()),
        Column::Numbers("pid", rows.iter().map(|_| words.pid).collect()),
        Column::SmallNumbers(
            "device",
            rows.iter().map(|(_, block)| device(block).about.device.ordinal.cast_signed()).collect(),
        ),
        Column::Numbers("address", rows.iter().map(|(_, block)| signed(block.key)).collect()),
        Column::Numbers("bytes", rows.iter().map(|(_, block)| signed(block.bytes)).collect()),
        Column::Numbers(
            "requested_bytes",
            rows.iter().map(|(number, block)| signed(device(block).steps[step(*number)].requested)).collect(),
        ),
        Column::OptionalNumbers("allocated_ns", rows.iter().map(allocated).collect()),
        Column::OptionalNumbers(
            "freed_ns",
            rows.iter().map(|(_, block)| (block.died != LIVE).then(|| time(block.died))).collect(),
        ),
        Column::Flags("is_live_at_peak", rows.iter().map(|(_, block)| is_at_peak(block)).collect()),
        Column::Texts("place", rows.iter().map(|(_, block)| place(block).shown.clone()).collect()),
        Column::OptionalTexts("line", rows.iter().map(|(_, block)| place(block).line.clone()).collect()),
        Column::OptionalTexts("caller", rows.iter().map(|(_, block)| place(block).caller.clone()).collect()),
    ]
}
