"""Reads the formats of `gpumem report --format` with the tools that they are for. Run it by hand, because it needs packages:

    $ pip install duckdb perfetto torch
    $ cargo run -p gpumem-cli --example million -- /tmp/train.capture 30
    $ python crates/cli/tests/proof/formats.py target/debug/gpumem /tmp/train.capture
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

import duckdb
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from torch.cuda import _memory_viz

command, recording = sys.argv[1:]
folder = pathlib.Path(tempfile.mkdtemp())


def gpumem(*arguments):
    return subprocess.run([command, "report", *arguments, recording], check=True, capture_output=True).stdout


overview = json.loads(gpumem("--json"))
peak = overview["devices"][0]["peak_bytes"]
events = overview["allocations"] + overview["frees"]

# Perfetto.
trace = perfetto_trace_pb2.Trace()
trace.ParseFromString(gpumem("--format", "perfetto"))
tracks = {packet.track_descriptor.uuid: packet.track_descriptor.name for packet in trace.packet}
counters = [
    packet.track_event.counter_value
    for packet in trace.packet
    if tracks.get(packet.track_event.track_uuid) == "device 0: in use"
]
assert max(counters) == peak and len(counters) == events, (max(counters), len(counters))
assert all(len(UnknownFieldSet(packet)) == 0 for packet in trace.packet), "all fields are known"
assert all(len(UnknownFieldSet(packet.track_event)) == 0 for packet in trace.packet)
print(f"perfetto: {len(trace.packet)} packets")

# PyTorch.
pickle = folder / "train.pickle"
pickle.write_bytes(gpumem("--format", "torch"))
for action in (["stats"], ["trace"], ["trace_plot", "-o", folder / "t.html"], ["segment_plot", "-o", folder / "s.html"]):
    script = [sys.executable, _memory_viz.__file__, action[0], pickle, *action[1:]]
    text = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    print(f"torch {action[0]}: {len(text.splitlines())} lines")

# Browsers, and anything else that reads XML.
texts = [text.text for text in xml.etree.ElementTree.fromstring(gpumem("--format", "svg")).iter("{*}text")]
assert "at the peak" in texts, texts
print(f"svg: {texts[0]}")

# DuckDB.
gpumem("--format", "parquet", "--output", folder)
most = duckdb.sql(f"select max(live_bytes), count(*) from '{folder}/*.events.parquet'").fetchall()[0]
assert most == (peak, events), most
at_peak = duckdb.sql(f"select sum(bytes_at_peak) from '{folder}/*.blocks.parquet' where is_on_device")
assert at_peak.fetchall()[0] == (peak,)
print(f"parquet: {most[1]} events")
