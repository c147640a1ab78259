//! Writes a table with a row for each event, one with a row for each block, one of PyTorch's tensors, and one of the memory that
//! the driver took by itself. Their columns
//! include the recording, the process and its rank, so that the files of a fleet can be queried together.

use std::{
    fs,
    io::{self, Write},
    path::Path,
    sync::Arc,
};

use gpumem_core::{export::shortened_command, model::DriverGauge};
use gpumem_recording::TensorClass;
use parquet::{
    basic::{Compression, ConvertedType, Encoding, Repetition, Type as Physical},
    data_type::{BoolType, ByteArray, ByteArrayType, DataType, Int32Type, Int64Type},
    errors::Result,
    file::{
        properties::WriterProperties,
        writer::{SerializedColumnWriter, SerializedFileWriter},
    },
    schema::types::{ColumnPath, Type},
};

use crate::{
    history::{BlockLife, Change, ChangeKind, History, Lives, Origin, ProcessSeries, tensors::Tensors},
    report::place_sums::NO_LINE,
};

/// The number of rows in a row group.
const ROWS: usize = 1 << 17;
/// Command lines are cut at this length: a longer one would be stored in each row instead of in a dictionary.
const MOST_COLUMNS: usize = 1_000;
/// The number of values that the writer gets at once. They fit into a processor's cache.
const VALUES: usize = 1 << 12;
/// The columns whose values differ from row to row.
const COUNTERS: [&str; 6] = ["number", "time_ns", "address", "live_bytes", "allocated_ns", "freed_ns"];

/// A column of rows of type `R`.
struct Column<'a, R> {
    name: &'static str,
    /// True if a value may be null, which is `None`.
    is_optional: bool,
    values: Values<'a, R>,
}

enum Values<'a, R> {
    Numbers(ValueOf<'a, R, i64>),
    SmallNumbers(ValueOf<'a, R, i32>),
    Texts(ValueOf<'a, R, ByteArray>),
    Flags(ValueOf<'a, R, bool>),
}

type EventColumn<'a> = Column<'a, EventRow>;
/// A column of blocks. Each row is a block with its number.
type BlockColumn<'a> = Column<'a, (u32, BlockLife)>;
/// Gets the value of a row.
type ValueOf<'a, R, T> = Box<dyn Fn(&R) -> Option<T> + 'a>;

impl<'a, R> Column<'a, R> {
    fn number(name: &'static str, value: impl Fn(&R) -> i64 + 'a) -> Self {
        Self { name, is_optional: false, values: Values::Numbers(Box::new(move |row| Some(value(row)))) }
    }

    fn optional_number(name: &'static str, value: impl Fn(&R) -> Option<i64> + 'a) -> Self {
        Self { name, is_optional: true, values: Values::Numbers(Box::new(value)) }
    }

    fn small_number(name: &'static str, value: impl Fn(&R) -> i32 + 'a) -> Self {
        Self { name, is_optional: false, values: Values::SmallNumbers(Box::new(move |row| Some(value(row)))) }
    }

    fn text(name: &'static str, value: impl Fn(&R) -> &'a ByteArray + 'a) -> Self {
        Self { name, is_optional: false, values: Values::Texts(Box::new(move |row| Some(value(row).clone()))) }
    }

    fn optional_text(name: &'static str, value: impl Fn(&R) -> Option<&'a ByteArray> + 'a) -> Self {
        Self { name, is_optional: true, values: Values::Texts(Box::new(move |row| value(row).cloned())) }
    }

    fn flag(name: &'static str, value: impl Fn(&R) -> bool + 'a) -> Self {
        Self { name, is_optional: false, values: Values::Flags(Box::new(move |row| Some(value(row)))) }
    }

    fn schema(&self) -> Result<Type> {
        let (physical, converted) = match self.values {
            Values::Numbers(_) => (Physical::INT64, ConvertedType::NONE),
            Values::SmallNumbers(_) => (Physical::INT32, ConvertedType::NONE),
            Values::Texts(_) => (Physical::BYTE_ARRAY, ConvertedType::UTF8),
            Values::Flags(_) => (Physical::BOOLEAN, ConvertedType::NONE),
        };
        let repetition = if self.is_optional { Repetition::OPTIONAL } else { Repetition::REQUIRED };
        let column = Type::primitive_type_builder(self.name, physical);
        column.with_repetition(repetition).with_converted_type(converted).build()
    }

    fn write(&self, rows: &[R], mut column: SerializedColumnWriter<'_>) -> Result<()> {
        match &self.values {
            Values::Numbers(value) => self.write_values::<Int64Type>(value, rows, &mut column),
            Values::SmallNumbers(value) => self.write_values::<Int32Type>(value, rows, &mut column),
            Values::Texts(value) => self.write_values::<ByteArrayType>(value, rows, &mut column),
            Values::Flags(value) => self.write_values::<BoolType>(value, rows, &mut column),
        }?;
        column.close()
    }

    fn write_values<T: DataType>(
        &self,
        value: &ValueOf<'_, R, T::T>,
        rows: &[R],
        column: &mut SerializedColumnWriter<'_>,
    ) -> Result<()> {
        for rows in rows.chunks(VALUES) {
            let mut is_there = Vec::with_capacity(rows.len());
            let values = rows.iter().map(value).inspect(|value| is_there.push(i16::from(value.is_some())));
            let values: Vec<_> = values.flatten().collect();
            column.typed::<T>().write_batch(&values, self.is_optional.then_some(&*is_there), None)?;
        }
        Ok(())
    }
}

/// The values that all rows of a recording share, and the texts of its origins.
struct Words {
    recording: ByteArray,
    pid: i64,
    host: Option<ByteArray>,
    rank: Option<i64>,
    command: ByteArray,
    /// The names of changes, by [`ChangeKind`].
    actions: Vec<ByteArray>,
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

/// The origins of tensors.
struct TensorPlace {
    /// The line, or the text shown instead.
    shown: ByteArray,
    line: Option<ByteArray>,
    caller: Option<ByteArray>,
    module: Option<ByteArray>,
    class: Option<ByteArray>,
}

impl TensorPlace {
    fn new(origin: &Origin, class: Option<TensorClass>) -> Self {
        let line = origin.line.as_deref().map(text);
        let caller = origin.caller.as_deref().map(text);
        let module = origin.path.first().map(|module| text(module));
        let class = class.map(|class| text(class.name()));
        Self { shown: line.clone().unwrap_or_else(|| text(NO_LINE)), line, caller, module, class }
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
        let process = history.definitions().process();
        Self {
            recording: text(&name),
            pid: process.pid.into(),
            host: optional(&process.host),
            rank: process.rank.map(u64::cast_signed),
            command: text(&shortened_command(&process.arguments.join(" "), MOST_COLUMNS)),
            actions: ChangeKind::ALL.map(|kind| text(kind.name())).to_vec(),
            origins: history.origins.iter().map(origin).collect(),
        }
    }
}

/// Writes `NAME.events.parquet` and `NAME.blocks.parquet` into a folder, where `NAME` is the recording's name. If
/// there are tensors, also writes `NAME.tensors.parquet`, and `NAME.driver.parquet` if the driver's memory was measured. Tensors are part of the blocks: because they have a separate
/// table, no sum counts them twice.
pub(crate) fn write(history: &History, folder: &Path) -> io::Result<()> {
    let words = Words::new(history);
    super::texts::check_texts(history, |origin| {
        let OriginWords { scope, place, .. } = &words.origins[origin as usize];
        scope.len() + place.len()
    })?;
    fs::create_dir_all(folder)?;
    let name = history.path.file_stem().unwrap_or_default().to_string_lossy();
    let path = |table: &str| folder.join(format!("{name}.{table}.parquet"));
    write_table(&path("events"), &event_columns(history, &words), events(history))?;
    write_table(&path("blocks"), &block_columns(history, &words), history.lives.blocks())?;
    let sizes = driver_sizes(history);
    if sizes.is_empty() {
        remove(&path("driver"))?;
    } else {
        write_table(&path("driver"), &driver_columns(&words), sizes.into_iter())?;
    }
    match history.tensors.as_ref().filter(|tensors| tensors.missing.is_none()) {
        Some(tensors) => write_tensors(tensors, &words, &path("tensors")),
        None => remove(&path("tensors")),
    }
}

/// Removes a table that an earlier recording of this name may have left.
fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path).or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })
}

/// The size of a kind of the driver's memory from a moment on.
struct DriverSize {
    device: i32,
    time: u64,
    kind: ByteArray,
    bytes: u64,
    is_at_most: bool,
}

/// Returns each change of a kind of the driver's memory, by device and kind.
fn driver_sizes(history: &History) -> Vec<DriverSize> {
    let of_series = |series: ProcessSeries| {
        let device = history.devices[usize::from(series.device)].device;
        let is_at_most = history.driver_measured_by(device) == Some(DriverGauge::AtMost);
        let (device, kind) = (device.ordinal.cast_signed(), text(series.name));
        let size = move |(time, bytes)| DriverSize { device, time, kind: kind.clone(), bytes, is_at_most };
        series.values.into_iter().map(size)
    };
    // The sum of the kinds and the live bytes of the events would be counted twice.
    history.process_series().into_iter().filter(|series| !series.is_sum()).flat_map(of_series).collect()
}

fn driver_columns(words: &Words) -> Vec<Column<'_, DriverSize>> {
    let mut columns = process_columns(words);
    columns.extend([
        Column::small_number("device", |row: &DriverSize| row.device),
        Column::number("time_ns", |row: &DriverSize| row.time.cast_signed()),
        Column {
            name: "kind",
            is_optional: false,
            values: Values::Texts(Box::new(|row: &DriverSize| Some(row.kind.clone()))),
        },
        Column::number("bytes", |row: &DriverSize| row.bytes.cast_signed()),
        Column::flag("is_at_most", |row: &DriverSize| row.is_at_most),
    ]);
    columns
}

fn write_tensors(tensors: &Tensors, words: &Words, path: &Path) -> io::Result<()> {
    let class = |at: usize| *tensors.classes.as_ref()?.get(at)?;
    let places: Vec<_> =
        tensors.origins.iter().enumerate().map(|(at, origin)| TensorPlace::new(origin, class(at))).collect();
    let rows = tensors.blocks.lives.blocks().filter(|(_, block)| block.origin != tensors.blocks.segment_origin);
    write_table(path, &tensor_columns(tensors, words, &places), rows)
}

fn write_table<R>(path: &Path, columns: &[Column<'_, R>], rows: impl Iterator<Item = R>) -> io::Result<()> {
    let fields = columns.iter().map(|column| column.schema().map(Arc::new)).collect::<Result<Vec<_>>>();
    let schema = fields.and_then(|fields| Type::group_type_builder("schema").with_fields(fields).build());
    let properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_created_by(concat!("gpumem ", env!("CARGO_PKG_VERSION")).to_owned());
    // A dictionary would make these columns larger and slower.
    let properties = COUNTERS.into_iter().map(ColumnPath::from).fold(properties, |properties, column| {
        let properties = properties.set_column_dictionary_enabled(column.clone(), false);
        properties.set_column_encoding(column, Encoding::DELTA_BINARY_PACKED)
    });
    let schema = Arc::new(schema.map_err(io::Error::other)?);
    let unfinished = path.with_extension("unfinished");
    let file = io::BufWriter::new(fs::File::create(&unfinished)?);
    let written = SerializedFileWriter::new(file, schema, Arc::new(properties.build()))
        .and_then(|writer| write_rows(writer, columns, rows));
    written.map_err(io::Error::other).and_then(|()| fs::rename(&unfinished, path)).inspect_err(|_| {
        _ = fs::remove_file(&unfinished);
    })
}

fn write_rows<R>(
    mut writer: SerializedFileWriter<impl Write + Send>,
    columns: &[Column<'_, R>],
    mut rows: impl Iterator<Item = R>,
) -> Result<()> {
    loop {
        let rows: Vec<_> = rows.by_ref().take(ROWS).collect();
        if rows.is_empty() {
            return writer.close().map(|_| ());
        }
        let mut group = writer.next_row_group()?;
        for column in columns {
            if let Some(place) = group.next_column()? {
                column.write(&rows, place)?;
            }
        }
        group.close()?;
    }
}

fn device(history: &History, block: &BlockLife) -> i32 {
    history.devices[usize::from(block.device)].device.ordinal.cast_signed()
}

struct EventRow {
    change: Change,
    block: BlockLife,
    /// The live bytes of the device after the event. `None` if the recording does not contain them.
    live: Option<i64>,
}

fn events(history: &History) -> impl Iterator<Item = EventRow> {
    let complete_from = history.complete_from();
    let mut live = vec![0_i64; history.devices.len()];
    history.lives.changes().enumerate().map(move |(at, change)| {
        let block = history.lives.block(change.block);
        let peak_at = history.devices[usize::from(block.device)].peak_at;
        let is_known = complete_from.map_or(peak_at.is_some_and(|peak| peak as usize == at), |first| first <= at);
        let live = &mut live[usize::from(block.device)];
        if history.origin(&block).kind.is_on_device() {
            *live += change.delta;
        }
        EventRow { change, block, live: is_known.then_some(*live) }
    })
}

/// Returns the columns that identify the process. All tables have them.
fn process_columns<R>(words: &Words) -> Vec<Column<'_, R>> {
    vec![
        Column::text("recording", |_| &words.recording),
        Column::number("pid", |_| words.pid),
        Column::optional_text("host", |_| words.host.as_ref()),
        Column::optional_number("rank", |_| words.rank),
        Column::text("command", |_| &words.command),
    ]
}

fn event_columns<'a>(history: &'a History, words: &'a Words) -> Vec<EventColumn<'a>> {
    let origin = |row: &EventRow| &words.origins[row.block.origin as usize];
    let action = |row: &EventRow| &words.actions[row.change.kind as usize];
    let mut columns = process_columns(words);
    columns.extend([
        EventColumn::number("number", |row| row.change.number.cast_signed()),
        EventColumn::number("time_ns", |row| row.change.time.cast_signed()),
        EventColumn::text("action", action),
        EventColumn::small_number("device", |row| device(history, &row.block)),
        EventColumn::number("address", |row| row.block.key.cast_signed()),
        EventColumn::number("change_bytes", |row| row.change.delta),
        EventColumn::optional_number("live_bytes", |row| row.live),
        EventColumn::text("kind", move |row| &origin(row).kind),
        EventColumn::flag("is_on_device", move |row| origin(row).is_on_device),
        EventColumn::small_number("thread", |row| row.change.thread.into()),
        EventColumn::text("scope", move |row| &origin(row).scope),
        EventColumn::text("place", move |row| &origin(row).place),
        EventColumn::optional_text("library", move |row| origin(row).library.as_ref()),
    ]);
    columns
}

/// Returns the bytes that a block has at a peak.
fn bytes_at(lives: &Lives, number: u32, block: &BlockLife, peak: Option<u32>) -> i64 {
    let peak = peak.filter(|peak| block.is_live_after(*peak));
    peak.map_or(0, |peak| lives.bytes_after(number, peak).cast_signed())
}

fn block_columns<'a>(history: &'a History, words: &'a Words) -> Vec<BlockColumn<'a>> {
    let origin = |block: &BlockLife| &words.origins[block.origin as usize];
    let peak = |block: &BlockLife| history.devices[usize::from(block.device)].peak_at;
    let mut columns = process_columns(words);
    columns.extend([
        BlockColumn::small_number("device", |(_, block)| device(history, block)),
        BlockColumn::number("address", |(_, block)| block.key.cast_signed()),
        BlockColumn::number("bytes", |(_, block)| block.bytes.cast_signed()),
        BlockColumn::text("kind", move |(_, block)| &origin(block).kind),
        BlockColumn::number("allocated_ns", |(_, block)| history.time_of(block.born).cast_signed()),
        BlockColumn::optional_number("freed_ns", |(_, block)| history.lives.time_of(block.died).map(u64::cast_signed)),
        BlockColumn::flag("is_on_device", move |(_, block)| origin(block).is_on_device),
        BlockColumn::number("bytes_at_peak", move |(number, block)| {
            bytes_at(&history.lives, *number, block, peak(block))
        }),
        BlockColumn::text("scope", move |(_, block)| &origin(block).scope),
        BlockColumn::text("place", move |(_, block)| &origin(block).place),
        BlockColumn::optional_text("line", move |(_, block)| origin(block).line.as_ref()),
        BlockColumn::optional_text("caller", move |(_, block)| origin(block).caller.as_ref()),
        BlockColumn::optional_text("library", move |(_, block)| origin(block).library.as_ref()),
        BlockColumn {
            name: "label",
            is_optional: true,
            values: Values::Texts(Box::new(|(number, _)| history.labels.get(number).map(|label| text(label)))),
        },
    ]);
    columns
}

/// Returns the columns of the table of tensors. Its blocks are tensors.
fn tensor_columns<'a>(tensors: &'a Tensors, words: &'a Words, places: &'a [TensorPlace]) -> Vec<BlockColumn<'a>> {
    let step = |number: u32| tensors.blocks.steps[number as usize];
    let device = |block: &BlockLife| &tensors.devices[usize::from(block.device)];
    let place = |block: &BlockLife| &places[block.origin as usize];
    let time = |change: u32| tensors.blocks.lives.change(change).time.cast_signed();
    let peak = move |block: &BlockLife| device(block).live.peak_at;
    let mut columns = process_columns(words);
    columns.extend([
        BlockColumn::small_number("device", move |(_, block)| device(block).about.device.ordinal.cast_signed()),
        BlockColumn::number("address", |(_, block)| block.key.cast_signed()),
        BlockColumn::number("bytes", |(_, block)| block.bytes.cast_signed()),
        BlockColumn::number("requested_bytes", move |(number, block)| {
            device(block).steps[step(*number)].requested.cast_signed()
        }),
        // The time is not known if a tensor is older than the history.
        BlockColumn::optional_number("allocated_ns", move |(number, block)| {
            (step(*number) >= device(block).older_count()).then(|| time(block.born))
        }),
        BlockColumn::optional_number("freed_ns", move |(_, block)| {
            tensors.blocks.lives.time_of(block.died).map(u64::cast_signed)
        }),
        BlockColumn::number("bytes_at_peak", move |(number, block)| {
            bytes_at(&tensors.blocks.lives, *number, block, peak(block))
        }),
        BlockColumn::text("place", move |(_, block)| &place(block).shown),
        BlockColumn::optional_text("line", move |(_, block)| place(block).line.as_ref()),
        BlockColumn::optional_text("caller", move |(_, block)| place(block).caller.as_ref()),
        BlockColumn::optional_text("module", move |(_, block)| place(block).module.as_ref()),
        BlockColumn::optional_text("class", move |(_, block)| place(block).class.as_ref()),
    ]);
    columns
}
