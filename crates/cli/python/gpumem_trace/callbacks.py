"""A row for each epoch of a training, in the loggers of its framework. Nothing imports this module but the program itself.

    from gpumem_trace.callbacks import Epochs, LightningCallback, TransformersCallback

    trainer = lightning.Trainer(callbacks=[LightningCallback()])    # PyTorch Lightning, as `lightning` or `pytorch_lightning`
    trainer.add_callback(TransformersCallback(trainer))             # a Trainer of Hugging Face
    epochs = Epochs(accelerator.log)                                # Accelerate, and any other loop

Each logs `gpumem/used_MB` and `gpumem/peak_MB`: how much more memory is in use at the end of the epoch than at the start of the training, and
the most that was in use during the epoch, compared with the start of the training. `rows` has the same in bytes. If nothing is measured, nothing
is logged.

With `layers=True`, each epoch is recorded with PyTorch's tensors, which slows it. What was in use at the peak of the tensors is logged by class, such as
`gpumem/class/weights_MB`, and for the ten largest layers, such as `gpumem/layer/GPT.h.0 … 11.mlp_MB`.
"""

import importlib
import math
import sys
import weakref

from ._library import Error, note
from ._record import record
from ._trace import GPUMemTrace, exact, peak_of

__all__ = ["Epochs", "LightningCallback", "TransformersCallback"]

# At most this many classes and layers are logged.
_MOST = 10


class Epochs:
    """Measures the epochs of a training loop, from the moment when it is created.

        epochs = Epochs(accelerator.log)        # or fabric.log_dict, wandb.log, mlflow.log_metrics, or a function of your own
        for epoch in range(3):
            ...
            epochs.end(epoch)                   # calls accelerator.log({"gpumem/used_MB": 10.0, "gpumem/peak_MB": 40.0}, step=epoch)
        epochs.stop()

    `rows` has a dict for each epoch, with sizes in bytes: `epoch`, `used`, `peak`, and `is_exact`, which is false if they may be wrong. With
    `layers`, it also has `classes` and `layers`: the sizes of all classes and layers at the peak of the tensors, by name, the largest first.
    """

    def __init__(self, log, device=None, layers=False):
        self.rows, self._log, self._used, self._recording = [], log, 0, None
        self._trace = GPUMemTrace(ctx="training", silent=True, device=device)
        if layers and self._trace.is_measured:
            self._record()

    def end(self, epoch, step=None):
        """Ends an epoch, and starts the next. `step` is what the logger gets if it is not the epoch."""
        values = self._next(epoch)
        if values:
            self._log(values, step=epoch if step is None else step)

    def _next(self, epoch):
        values = self._trace._values(is_next=True)
        if not self._trace.is_measured:
            return None
        peak = self._used + peak_of(values)
        self._used += values.used
        row = {"epoch": epoch, "used": self._used, "peak": peak, "is_exact": exact(values)}
        self.rows.append(row)
        logged = {"gpumem/used_MB": self._used / 2**20, "gpumem/peak_MB": peak / 2**20}
        for kind, sizes in self._at_peak().items():
            row["classes" if kind == "class" else "layers"] = sizes
            logged.update((f"gpumem/{kind}/{name}_MB", size / 2**20) for name, size in list(sizes.items())[:_MOST])
        return logged

    def _record(self):
        """Records the next epoch."""
        try:
            self._recording = record(layers=True)
            self._recording.start()
        except Error as why:
            self._give_up(why)

    def _at_peak(self):
        """Ends the recording of an epoch, and starts the next. Returns the classes and the layers at the peak of the tensors."""
        if self._recording is None:
            return {}
        try:
            self._recording.stop()
            tensors = self._recording.data()["torch"] or {"missing": "PyTorch was not used", "devices": []}
            self._record()
            peaks = [device["peak"] for device in tensors["devices"] if device["peak"]]
            if tensors["missing"] or tensors["missing_modules"]:
                self._give_up(tensors["missing"] or tensors["missing_modules"])
            elif peaks:
                most = max(peaks, key=lambda peak: peak["allocated_bytes"])
                layers = {row["module"] or "outside of all layers": row["bytes"] for row in most["by_module"]}
                return {"class": {row["class"]: row["bytes"] for row in most["by_class"]}, "layer": layers}
        except Error as why:
            self._give_up(why)
        return {}

    def _give_up(self, why):
        self._end_recording()
        note(f"the layers of the epochs are not known: {why}")

    def _end_recording(self):
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def stop(self):
        """Ends the measurement."""
        self._end_recording()
        self._trace.stop()


class _Callback:
    """What the callbacks have in common."""

    def __init__(self, device=None, layers=False):
        super().__init__()
        self._device, self._layers, self._epochs = device, layers, None

    @property
    def rows(self):
        """The rows of the last training: see `Epochs`."""
        return self._epochs.rows if self._epochs else []

    def _start(self):
        self._stop()
        try:
            # It does not refer to the trainer, whose model it would keep alive.
            self._epochs = Epochs(None, self._device, self._layers)
        except Error as why:
            # The training goes on.
            self._epochs = None
            note(f"the epochs are not measured: {why}")

    def _end(self, epoch):
        # A callback may be added when the training has started.
        return self._epochs._next(epoch) if self._epochs else None

    def _stop(self):
        if self._epochs:
            self._epochs.stop()


def _lightning():
    names = ["lightning.pytorch", "pytorch_lightning"]
    # The two do not know each other's classes.
    names = [name for name in names if name in sys.modules] or names
    bases = [module.Callback for module in map(_imported, names) if module]
    if not bases:
        raise ImportError("LightningCallback needs PyTorch Lightning; install it with `pip install lightning`")

    class LightningCallback(_Callback, *bases):
        """Logs the memory of each epoch into the loggers of the trainer: `Trainer(callbacks=[LightningCallback()])`."""

        # It is found again by this name, in a process to which Lightning sends it.
        __qualname__ = "LightningCallback"

        def on_train_start(self, trainer, pl_module):
            self._start()

        def on_train_epoch_end(self, trainer, pl_module):
            values = self._end(trainer.current_epoch)
            # The module's own `log` would allocate a tensor for each value.
            for logger in trainer.loggers if values else []:
                # Lightning logs its own values for an epoch at the last step in it.
                logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=max(trainer.global_step - 1, 0))

        def on_train_end(self, trainer, pl_module):
            self._stop()

        def on_exception(self, trainer, pl_module, exception):
            self._stop()

    return LightningCallback


def _transformers():
    transformers = _imported("transformers")
    if not transformers:
        raise ImportError("TransformersCallback needs Hugging Face's library; install it with `pip install transformers`")

    class TransformersCallback(_Callback, transformers.TrainerCallback):
        """Logs the memory of each epoch as the trainer logs its loss: `trainer.add_callback(TransformersCallback(trainer))`."""

        __qualname__ = "TransformersCallback"

        def __init__(self, trainer, device=None, layers=False):
            super().__init__(device, layers)
            # The trainer has the callback. A cycle would keep its model alive.
            self._trainer = weakref.ref(trainer)

        def on_train_begin(self, args, state, control, **kwargs):
            self._start()

        def on_epoch_end(self, args, state, control, **kwargs):
            # It is a fraction if the training ends inside of an epoch.
            values = self._end(math.ceil(state.epoch - 1e-6) - 1)
            if values:
                # The trainer's own values for the epoch come after this, unless it takes them for logged.
                should_log = control.should_log
                self._trainer().log(values)
                control.should_log = should_log

        def on_train_end(self, args, state, control, **kwargs):
            self._stop()

    return TransformersCallback


def _imported(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def __getattr__(name):
    # The base classes are imported when a callback is asked for.
    makes = {"LightningCallback": _lightning, "TransformersCallback": _transformers}
    if name not in makes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, makes[name]())
