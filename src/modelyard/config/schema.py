"""Every option of a run: its type, its default, its help, in themed groups.

The options of single models, optimizers, schedules and datasets stand with those parts; they join these when the part
is chosen (see `resolve.py`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from modelyard.config.calls import Call, CallList, parse_list
from modelyard.config.durations import DurationField, StepDuration
from modelyard.config.renames import Renames
from modelyard.registry import DATASETS, MODELS, OPTIMIZERS, SCHEDULES, Entry, Options, Registry

PARTS: dict[str, Registry] = {
    "model": MODELS,
    "dataset": DATASETS,
    "optimizer": OPTIMIZERS,
    "learning_rate_schedule": SCHEDULES,
}
"""Core options that choose a part, whose own options then join the config."""

EXCLUSIVE = (("train_steps", "train_epochs"), ("eval_every", "epochs_between_evals"))
"""Two ways to say one thing: both at one level is an error, and the higher level displaces the other."""

Names = Annotated[tuple[str, ...], BeforeValidator(parse_list)]


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError(f"names {max(names, key=names.count)!r} twice.")
    return names


Views = Annotated[tuple[Literal["flip", "shift"], ...], BeforeValidator(parse_list), AfterValidator(_each_once)]
Formats = Annotated[
    tuple[Literal["saved_model", "keras", "onnx", "tflite"], ...],
    BeforeValidator(parse_list),
    AfterValidator(_each_once),
]

USUAL_HOOKS = ("nan_guard", "throughput", "metrics", "log", "tensorboard", "progress", "best", "checkpoint")


def edit_hooks(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """The hooks of a run: the usual ones, changed by ``+name`` and ``-name``, or exactly those that are named."""
    edits = [call for call in calls if call.name[0] in "+-"]
    if edits and len(edits) != len(calls):
        raise ValueError(
            "mixes '+name' or '-name', which change the usual hooks, with plain names, which replace them."
        )
    if calls and not edits:
        return calls
    chosen = {name: Call(name) for name in USUAL_HOOKS}
    for call in edits:
        name = call.name[1:]
        if call.name[0] == "+":
            chosen[name] = Call(name, call.arguments)
        elif chosen.pop(name, None) is None:
            raise ValueError(
                f"'-{name}' takes away a hook that is not there. The usual ones: {', '.join(USUAL_HOOKS)}."
            )
    return tuple(chosen.values())


def _check_hooks(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    edit_hooks(calls)
    return calls


def option(default: Any, help_text: str, *, free: bool = False, **limits: Any) -> Any:
    """An option. ``free``: it may change when a run is resumed, since it does not change what is learned."""
    return Field(default, description=help_text, json_schema_extra={"free": free}, **limits)


class Group(BaseModel):
    """Options that belong together."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
        validate_default=True,
        allow_inf_nan=False,
    )
    title: ClassVar[str]


class Experiment(Group):
    """What is trained on what."""

    title = "Experiment"
    model: str = option("simple_cnn", "model to train; `modelyard models` lists them")
    dataset: str = option(
        "digits",
        "dataset by name, or the path of your files (a folder, .csv, .npz, records); `modelyard datasets` lists",
    )
    task: Literal["auto", "classification", "regression", "multi_label"] = option(
        "auto", "what a network is trained as; auto: by the labels (whole numbers, floats, rows of 0 and 1)"
    )
    recipe: str | None = option(None, "recipe to start from: a name or a YAML file")
    random_seed: int = option(0, "seed of initial weights, order, augmentation and dropout", ge=0, lt=2**63)
    plugins: Names = option((), "your own code to import first: modules or .py files, separated by commas", free=True)


class Files(Group):
    """Where options are read from."""

    title = "Config files"
    config_file: str | None = option(
        None, "YAML file of run options, or the config.yaml of a run; default: ./project.yaml if there", free=True
    )
    config_set: str | None = option(None, "named set to take from it (default: default)", free=True)
    hyperparameter_file: str | None = option(
        None, "YAML file of hyperparameters; default: ./hyperparameters.yaml if there", free=True
    )
    hyperparameter_set: str | None = option(None, "named set to take from it (default: default)", free=True)


class Data(Group):
    """How examples are read."""

    title = "Data"
    data_dir: str = option("data", "folder with the files of mnist, fashion_mnist, cifar10, cifar100", free=True)
    cache_dir: str | None = option(
        None,
        "folder for copies of remote files and for compiled programs (default: $MODELYARD_CACHE or ~/.cache/modelyard)",
        free=True,
    )
    validation_fraction: float = option(
        0.1, "share of the training split set aside where a dataset has no validation split; 0: none", ge=0, lt=1
    )
    split_seed: int = option(0, "seed of that split, apart from random_seed, so that seeds share it", ge=0, lt=2**63)
    augment: CallList = option((), "augmentations for training, in order: pad_and_crop(padding=4), flip_left_right")
    preprocess: CallList = option((), "your own preprocessing for training and evaluation, in order")
    shuffle: Literal["auto", "full", "blocks"] = option(
        "auto", "order of an epoch: full is one permutation, blocks is for huge sets; auto: blocks above 4 million"
    )
    resident: Literal["auto", "always", "never"] = option(
        "auto", "keep the dataset on the device: auto does where it fits", free=True
    )
    input_threads: int = option(
        0, "threads that read and decode what is not resident; 0: as many as there are cores", free=True, ge=0
    )


class Training(Group):
    """How the model is trained."""

    title = "Training"
    train_batch_size: int = option(64, "examples per step, over all devices", ge=1)
    train_epochs: float | None = option(10, "length of the run in epochs", free=True, gt=0)
    train_steps: int | None = option(None, "length of the run in steps, instead of train_epochs", free=True, ge=1)
    optimizer: str = option("adam", "optimizer: sgd, adam, adamw, rmsprop, muon")
    learning_rate: float = option(1e-3, "peak learning rate", gt=0)
    optimizer_groups: CallList = option(
        (),
        "optimizers for some weights, the first that matches: \"sgd(match='logits/*|*/bias', learning_rate=0.1)\"",
    )
    fine_tune: CallList = option(
        (),
        "layers to train, the others stay: head, all, \"layers(match='block_16*|head')\", top(layers=20); or phases: "
        "\"head(until='30 %'), all(factor=0.1)\"",
    )
    freeze_batch_norm: bool = option(False, "batch norm keeps the statistics, scale and offset that it begins with")
    learning_rate_schedule: str = option(
        "constant", "constant, piecewise, exponential, polynomial, cosine, triangular, one_cycle"
    )
    warmup: StepDuration | None = option(None, "linear warm-up from zero, such as '5 epochs' or '3 %'")
    l2_regularization: float = option(
        0.0, "adds this times the weight to the gradient of every kernel (torch calls it weight_decay)", ge=0
    )
    clip_norm: float | None = option(None, "clip the gradients to this global norm", gt=0)
    ema_decay: float = option(
        0.0, "average of the weights over steps; evaluated and tested instead of the raw ones; 0: none", ge=0, lt=1
    )
    gradient_accumulation: int = option(1, "compute each batch in this many pieces, to save memory", ge=1)


class Evaluation(Group):
    """When and how the model is evaluated."""

    title = "Evaluation"
    eval_batch_size: int = option(500, "examples per evaluation step, over all devices", free=True, ge=1)
    epochs_between_evals: float | None = option(1, "evaluate after every so many epochs", free=True, gt=0)
    eval_every: StepDuration | None = option(
        None, "evaluate after every '500 steps' or '10 %', instead of epochs_between_evals", free=True
    )
    eval_throttle_secs: float = option(0.0, "skip an evaluation if the last was less long ago", free=True, ge=0)
    test_time_augmentation: Views = option(
        (), "average over views of each image: flip (mirrored), shift (by a pixel), or flip,shift", free=True
    )
    best_metric: str = option("auto", "validation metric that chooses the best model; auto: accuracy, else loss")
    best_mode: Literal["auto", "max", "min"] = option(
        "auto", "whether more or less is better; auto: less for losses and errors"
    )
    test_at_end: bool = option(False, "evaluate the best model on the test split when training ends", free=True)


class Devices(Group):
    """Where it runs."""

    title = "Devices"
    engine: str = option(
        "auto", "tensorflow or jax; auto: JAX where it sees an accelerator, else TensorFlow", free=True
    )
    num_gpus: Annotated[int, Field(ge=0)] | Literal["auto", "all"] = option(
        "auto", "GPUs to use: a number, all, or auto (one if any)", free=True
    )
    gpu_id: int | None = option(None, "use this one GPU", free=True, ge=0)
    cpu_devices: int = option(1, "split the CPU into this many devices, to try out several", free=True, ge=1)
    threads: int = option(0, "CPU threads; 0: as many as there are cores", free=True, ge=0)
    precision: Literal["float32", "bfloat16", "float16", "float64"] = option(
        "float32", "bfloat16 and float16 are mixed precision, float16 with loss scaling"
    )
    xla: bool = option(False, "compile the steps with XLA", free=True)
    autotune: bool = option(
        True,
        "try out which GPU kernels are best: half a minute at the first start, steps up to a quarter faster",
        free=True,
    )
    deterministic: bool = option(False, "the same run twice gives the same bits, at some cost in speed")
    sync_batch_norm: bool = option(True, "batch-norm statistics over all devices")
    shard_parameters: bool = option(
        False, "divide large parameters and their optimizer slots over all devices (engine jax)", free=True
    )


class Machines(Group):
    """Several processes, on one machine or on many."""

    title = "Several machines"
    cluster: Literal["auto", "none"] = option(
        "auto", "auto finds the other processes in TF_CONFIG or SLURM's variables, none trains alone", free=True
    )
    scale_learning_rate: bool = option(False, "multiply the learning rate by the number of devices, over all machines")
    start_timeout_secs: float = option(300.0, "how long to wait for the other processes at the start", free=True, gt=0)
    peer_timeout_secs: float = option(
        60.0, "a process that is silent for so long is lost, and the run ends with an error", free=True, ge=2
    )


class Saving(Group):
    """The run folder and what is kept in it."""

    title = "Run folder"
    runs_dir: str = option("runs", "folder for new runs", free=True)
    model_dir: str | None = option(
        None, "run folder; an existing one is resumed (default: a new one, named by time, under runs_dir)", free=True
    )
    run_name: str | None = option(None, "name for the folder of a new run (default: MODEL-DATASET)", free=True)
    best_model_dir: str | None = option(None, "folder for the best models (default: best/ in the run folder)")
    resume: Literal["auto", "never", "must"] = option(
        "auto", "what to do with a model_dir that exists: auto and must go on with it, never refuses", free=True
    )
    checkpoint_path: str | None = option(
        None,
        "weights to start from: a run or checkpoint folder, a file .safetensors, .keras, .weights.h5 or .h5, "
        "a TensorFlow checkpoint",
    )
    checkpoint_include: Names = option((), "weights of the model to take from there, such as 'conv*,*/kernel'; all")
    checkpoint_exclude: Names = option((), "weights of the model not to take from there, such as 'logits/*'")
    checkpoint_rename: Renames = option(
        (), "turns names there into the model's: 'regex=replacement', such as '^backbone/=,weights$=kernel'"
    )
    strict: bool = option(False, "everything in the model must be loaded from checkpoint_path, in its shape")
    save_every: DurationField = option(
        "5 min", "save a checkpoint after every '500 steps', '1 epochs', '10 min'", free=True
    )
    keep_checkpoints: int = option(3, "newest checkpoints to keep", free=True, ge=1)
    keep_best: int = option(1, "best models to keep", free=True, ge=1)
    export_at_end: Formats = option(
        (),
        "export the best model, or the last if there is none, when training ends: saved_model, keras, onnx, tflite",
        free=True,
    )
    hypothesis: str = option("", "what you expect of this run; goes into training_log.md", free=True)


class Hooks(Group):
    """What happens beside training."""

    title = "Hooks and logging"
    hooks: Annotated[CallList, AfterValidator(_check_hooks)] = option(
        (),
        "'+name(...)' adds a hook to the usual ones, '-name' takes one away, plain names replace them; "
        "`modelyard hooks` lists them",
        free=True,
    )
    log_every: StepDuration = option(
        "100 steps", "log training metrics after every '100 steps' or '1 epochs'", free=True
    )


class Config(Experiment, Files, Data, Training, Evaluation, Devices, Machines, Saving, Hooks):
    """The resolved config of a run. Make one with `modelyard.load_config`."""

    title = "Config"
    part_options: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: list[str] = PrivateAttr(default_factory=list)

    def options_of(self, part: str) -> Options:
        """The typed options of the chosen ``part``: "model", "dataset", "optimizer" or "learning_rate_schedule"."""
        entry = self.entry(part)
        mine = {key: self.part_options[key] for key in entry.options.model_fields if key in self.part_options}
        return entry.options(**mine)

    def entry(self, part: str) -> Entry:
        """The registered part that was chosen."""
        name = getattr(self, part)
        registry = PARTS[part]
        return registry.get(PATH_DATASET if part == "dataset" and is_path(name) else name)

    def flat(self) -> dict[str, Any]:
        """All options as plain YAML values, those of the chosen parts included."""
        values = self.model_dump(mode="json")
        return {**{key: values[key] for key in CORE_FIELDS}, **self.part_options}

    def defaults(self) -> dict[str, Any]:
        """What every option has when nobody sets it, for the parts that are chosen."""
        values = type(self)().model_dump(mode="json")
        for part in PARTS:
            options = self.entry(part).options.model_construct()  # not checked: some may have no default
            values.update(options.model_dump(mode="json", warnings=False))
        return values

    def changed(self) -> dict[str, Any]:
        """The options that are not as they are by default."""
        defaults = self.defaults()
        return {key: value for key, value in self.flat().items() if value != defaults.get(key)}

    def origin(self, key: str) -> str:
        """Where the value of ``key`` came from."""
        return self._origins.get(key, "default")

    @property
    def notes(self) -> list[str]:
        """What was set somewhere and is not used in this run."""
        return list(self._notes)


GROUPS: tuple[type[Group], ...] = (Experiment, Files, Data, Training, Evaluation, Devices, Machines, Saving, Hooks)
CORE_FIELDS = {name: info for group in GROUPS for name, info in group.model_fields.items()}


def is_free(key: str) -> bool:
    """Whether ``key`` may change when a run is resumed."""
    info = CORE_FIELDS.get(key)
    extra = info.json_schema_extra if info else None
    return bool(isinstance(extra, dict) and extra.get("free"))


PATH_DATASET = "files"
"""The registered dataset that a path stands for."""
_FILES = re.compile(r"\.(npz|npy|csv|tfrecords?|tfrec|records?)(\.gz)?$", re.IGNORECASE)


def is_path(dataset: str) -> bool:
    """Whether a dataset is named by a path and not by a registered name: it has a slash or the ending of a file, or is
    no known name but a folder that is there.
    """
    if "/" in dataset or os.sep in dataset or dataset in (".", "..") or _FILES.search(dataset):
        return True
    return dataset not in DATASETS.names() and Path(dataset).is_dir()
