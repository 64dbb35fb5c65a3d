"""Every option of a run: its type, its default and its help text, in groups.

A model, optimizer, schedule or dataset declares its own options. They are part of the config when it is chosen (see
`resolve.py`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from modelyard.config.calls import Call, CallList, parse_list
from modelyard.config.durations import DurationOrAuto, StepDuration
from modelyard.registry import DATASETS, MODELS, OPTIMIZERS, SCHEDULES, Entry, Options, Registry

COMPONENTS: dict[str, Registry] = {
    "model": MODELS,
    "dataset": DATASETS,
    "optimizer": OPTIMIZERS,
    "learning_rate_schedule": SCHEDULES,
}
"""Core options that choose a component, whose own options then are part of the config."""

EXCLUSIVE = (("train_steps", "train_epochs"), ("eval_every", "epochs_between_evals"))
"""Pairs of options for one thing. Both at one level are an error; a higher level overrides the other of the pair."""

TRUST = "trust"
"""Not an option of the config, which a stranger may have written: the user says so for one command, and no file can."""

DEFAULT_HOOKS = ("nan_guard", "throughput", "metrics", "log", "tensorboard", "progress", "best", "checkpoint")


# -- types of options --------------------------------------------------------------------------------------------------


def _check_repeats(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError(f"names {max(names, key=names.count)!r} twice.")
    return names


def parse_rename(text: str) -> tuple[re.Pattern[str], str]:
    """Splits ``regex=replacement`` at the last ``=``.

    Raises:
        ValueError: if it is not valid.
    """
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise ValueError(f"{text!r} is not 'regex=replacement', such as '^backbone/=' or 'weights$=kernel'.")
    try:
        compiled = re.compile(pattern)
        re.compile(f"(?:{pattern})|").sub(replacement, "")  # raises if the replacement refers to a missing group
    except (re.error, IndexError) as error:
        raise ValueError(f"{text!r} is not a valid regular expression and replacement: {error}.") from error
    return compiled, replacement


def _check_renames(rules: tuple[str, ...]) -> tuple[str, ...]:
    for rule in rules:
        parse_rename(rule)
    return rules


def edit_hooks(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """The hooks of a run: the default ones, changed by ``+name`` and ``-name``, or exactly those that are named."""
    edits = [call for call in calls if call.name[0] in "+-"]
    if edits and len(edits) != len(calls):
        raise ValueError(
            "mixes '+name' or '-name', which change the default hooks, with plain names, which replace them."
        )
    if calls and not edits:
        return calls
    chosen = {name: Call(name) for name in DEFAULT_HOOKS}
    for call in edits:
        name = call.name[1:]
        if call.name[0] == "+":
            chosen[name] = Call(name, call.arguments)
        elif chosen.pop(name, None) is None:
            raise ValueError(f"'-{name}' removes a hook that is not used. Default hooks: {', '.join(DEFAULT_HOOKS)}.")
    return tuple(chosen.values())


def _check_hooks(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    edit_hooks(calls)
    return calls


def split_group_of(text: str) -> tuple[str, str | None]:
    """Splits ``COLUMN:REGEX`` into both. Without a group in parentheses behind the colon, it is the name of a column.

    Raises:
        ValueError: if the regular expression is not valid.
    """
    column, colon, pattern = text.partition(":")
    if not colon or "(" not in pattern:
        return text, None
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {error}.") from error
    return (column, pattern) if groups else (text, None)


def _check_split_group(text: str) -> str:
    split_group_of(text)
    if not text.strip():
        raise ValueError("is empty; name a column.")
    return text


Names = Annotated[tuple[str, ...], BeforeValidator(parse_list)]
SplitGroup = Annotated[str, AfterValidator(_check_split_group)]
Renames = Annotated[Names, AfterValidator(_check_renames)]
Views = Annotated[tuple[Literal["flip", "shift"], ...], BeforeValidator(parse_list), AfterValidator(_check_repeats)]
Formats = Annotated[
    tuple[Literal["saved_model", "keras", "onnx", "tflite"], ...],
    BeforeValidator(parse_list),
    AfterValidator(_check_repeats),
]


def option(default: Any, help_text: str, *, mutable: bool = False, **limits: Any) -> Any:
    """An option. If ``mutable``, it may change when a run is resumed, since it does not affect the result."""
    return Field(default, description=help_text, json_schema_extra={"mutable": mutable}, **limits)


# -- options -----------------------------------------------------------------------------------------------------------


class Group(BaseModel):
    """Options that belong together. The docstring is their title in ``--help``."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
        validate_default=True,
        allow_inf_nan=False,
    )
    title: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.title = (cls.__doc__ or "").removesuffix(".")


class Experiment(Group):
    """Experiment."""

    model: str = option("simple_cnn", "model to train; `modelyard models` lists them")
    dataset: str = option(
        "digits",
        "name of a dataset, or path of your files: a folder, .csv, .npz, records; `modelyard datasets` lists the names",
    )
    task: Literal["auto", "classification", "regression", "multi_label"] = option(
        "auto", "task of the network; auto: from the labels (integers, floats, rows of 0 and 1)"
    )
    recipe: str | None = option(None, "recipe to start from: a name or a YAML file")
    random_seed: int = option(0, "seed of initial weights, order, augmentation and dropout", ge=0, lt=2**63)
    plugins: Names = option((), "import your own code first: modules or .py files, separated by commas", mutable=True)


class Files(Group):
    """Config files."""

    config_file: str | None = option(
        None, "YAML file of options, or the config.yaml of a run (default: ./project.yaml if it exists)", mutable=True
    )
    config_set: str | None = option(None, "named set in config_file (default: default)", mutable=True)
    hyperparameter_file: str | None = option(
        None, "YAML file of hyperparameters (default: ./hyperparameters.yaml if it exists)", mutable=True
    )
    hyperparameter_set: str | None = option(None, "named set in hyperparameter_file (default: default)", mutable=True)


class Data(Group):
    """Data."""

    data_dir: str = option("data", "folder with the files of mnist, fashion_mnist, cifar10, cifar100", mutable=True)
    cache_dir: str | None = option(
        None,
        "folder for copies of remote files and compiled programs (default: $MODELYARD_CACHE or ~/.cache/modelyard)",
        mutable=True,
    )
    validation_fraction: float = option(
        0.1, "fraction of the training split to hold out if a dataset has no validation split; 0: none", ge=0, lt=1
    )
    test_fraction: float = option(
        0.0, "fraction of the training split to hold out if a dataset has no test split; 0: none", ge=0, lt=1
    )
    split_group: SplitGroup | None = option(
        None,
        "keep examples with the same value together in one split or fold: a column, a feature, "
        "or a part of it such as 'path:([^/_]+)_'",
    )
    folds: int | None = option(
        None, "cross-validation: divide train into so many folds; fold is the validation split, the others train",
        ge=2, le=1000,
    )  # fmt: skip
    fold: int | None = option(None, "which fold is the validation split, from 1; `modelyard matrix` runs all", ge=1)
    split_seed: int = option(
        0, "seed of derived splits and folds; runs with different random_seed share them", ge=0, lt=2**63
    )
    on_bad: Literal["fail", "skip"] = option(
        "fail", "an image that can't be decoded. fail: an error; skip: all are decoded at the start, bad ones left out"
    )
    augment: CallList = option((), "augmentations for training, in order: pad_and_crop(padding=4), flip_left_right")
    preprocess: CallList = option((), "your own preprocessing for training and evaluation, in order")
    shuffle: Literal["auto", "full", "blocks"] = option(
        "auto",
        "order of an epoch. full: one permutation; blocks: for huge datasets; auto: blocks above 4 million examples",
    )
    resident: Literal["auto", "always", "never"] = option(
        "auto",
        "keep the dataset in device memory; auto: up to 2 GiB, or half of what a GPU has free (JAX)",
        mutable=True,
    )
    input_threads: int = option(
        0, "threads that read and decode data that is not resident; 0: one per core", mutable=True, ge=0
    )
    input_workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = option(
        "auto", "processes that do so instead of threads; auto: one per core from 4 cores on, else 0", mutable=True
    )


class Training(Group):
    """Training."""

    train_batch_size: int = option(64, "examples per step, over all devices", ge=1)
    train_epochs: float | None = option(10, "length of the run in epochs", mutable=True, gt=0)
    train_steps: int | None = option(None, "length of the run in steps, instead of train_epochs", mutable=True, ge=1)
    pause_at: StepDuration | None = option(
        None,
        "pause the run after '500 steps', '3 epochs' or '10 %': evaluate, save and exit; `modelyard resume` goes on. "
        "It holds for this start only, and the learning-rate schedule keeps its length",
        mutable=True,
    )
    optimizer: str = option("adam", "optimizer: sgd, momentum, adam, adamw, rmsprop, adagrad, adadelta, ftrl, muon")
    learning_rate: float = option(1e-3, "peak learning rate", gt=0)
    optimizer_groups: CallList = option(
        (),
        "other optimizers for some weights; the first match applies: "
        "\"sgd(match='logits/*|*/bias', learning_rate=0.1)\"",
    )
    fine_tune: CallList = option(
        (),
        "layers to train; the others are frozen: head, all, \"layers(match='block_16*|head')\", top(layers=20). "
        "Or phases: \"head(until='30 %'), all(factor=0.1)\"",
    )
    freeze_batch_norm: bool = option(False, "freeze the statistics, scale and offset of batch norm")
    learning_rate_schedule: str = option(
        "constant", "constant, piecewise, exponential, polynomial, cosine, triangular, one_cycle"
    )
    warmup: StepDuration | None = option(None, "linear warm-up from zero, such as '5 epochs' or '3 %'")
    l2_regularization: float = option(
        0.0, "L2 penalty of kernels: 0.5 × this factor × squared norm, added to the loss", ge=0
    )
    clip_norm: float | None = option(None, "clip gradients to this global norm", gt=0)
    ema_decay: float = option(
        0.0, "decay of an EMA of the weights, which evaluation and exports use; 0: none", ge=0, lt=1
    )
    gradient_accumulation: int = option(1, "split each batch into this many micro-batches, to save memory", ge=1)


class Evaluation(Group):
    """Evaluation."""

    eval_batch_size: int = option(500, "examples per evaluation step, over all devices", mutable=True, ge=1)
    epochs_between_evals: float | None = option(1, "evaluate after every so many epochs", mutable=True, gt=0)
    eval_every: StepDuration | None = option(
        None, "evaluate after every '500 steps' or '10 %', instead of epochs_between_evals", mutable=True
    )
    eval_throttle_secs: float = option(0.0, "minimum time between two evaluations, in seconds", mutable=True, ge=0)
    test_time_augmentation: Views = option(
        (), "average over views of each image: flip (mirrored), shift (by a pixel), or flip,shift", mutable=True
    )
    test_time_augmentation_below: float | None = option(
        None,
        "only for images whose most probable class has a lower probability (default: all images)",
        mutable=True,
        gt=0,
        le=1,
    )
    metrics: CallList = option(
        (),
        "more metrics for every evaluation: 'top_k(k=3), f1, auc'; `modelyard metrics` lists them",
        mutable=True,
    )
    best_metric: str = option("auto", "validation metric that selects the best model; auto: accuracy, else loss")
    best_mode: Literal["auto", "max", "min"] = option(
        "auto", "whether higher or lower is better; auto: lower for losses and errors"
    )
    test_at_end: bool = option(False, "evaluate the best model on the test split when training ends", mutable=True)


class Devices(Group):
    """Devices."""

    engine: str = option(
        "auto", "tensorflow or jax; auto: JAX if it sees an accelerator, else TensorFlow", mutable=True
    )
    num_gpus: Annotated[int, Field(ge=0)] | Literal["auto", "all"] = option(
        "auto", "number of GPUs, all, or auto (one if there is any)", mutable=True
    )
    gpu_id: int | None = option(None, "index of the GPU to use", mutable=True, ge=0)
    cpu_devices: int = option(
        1, "number of virtual CPU devices, to test training on several devices", mutable=True, ge=1
    )
    threads: int = option(0, "CPU threads; 0: one per core", mutable=True, ge=0)
    precision: Literal["float32", "bfloat16", "float16", "float64"] = option(
        "float32", "bfloat16 and float16 are mixed precision, float16 with loss scaling"
    )
    loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["dynamic"] | None = option(
        None, "float16: a fixed number that multiplies the loss, or dynamic (the default)"
    )
    xla: bool = option(False, "compile steps with XLA", mutable=True)
    autotune: bool = option(
        True,
        "let XLA search for the fastest GPU kernels: half a minute at the first start, steps up to a quarter faster",
        mutable=True,
    )
    deterministic: bool = option(False, "give the same bits in every run, at some cost in speed")
    sync_batch_norm: bool = option(True, "compute batch-norm statistics over all devices")
    shard_parameters: bool = option(
        False, "shard large parameters and their optimizer state over all devices (engine jax)", mutable=True
    )


class Machines(Group):
    """Several machines."""

    cluster: Literal["auto", "none"] = option(
        "auto", "auto: find the other processes in TF_CONFIG or SLURM's variables; none: train alone", mutable=True
    )
    insecure_cluster: bool = option(
        False, "let processes on several machines join without a secret: whoever reaches their ports can", mutable=True
    )
    scale_learning_rate: bool = option(False, "multiply the learning rate by the number of devices of all machines")
    start_timeout_secs: float = option(
        300.0, "seconds to wait for the other processes at the start", mutable=True, gt=0
    )
    peer_timeout_secs: float = option(
        60.0, "seconds without a heartbeat after which a process is lost and the run fails", mutable=True, ge=2
    )


class Saving(Group):
    """Run folder."""

    runs_dir: str = option("runs", "folder for new runs", mutable=True)
    model_dir: str | None = option(
        None, "run folder; an existing run is resumed (default: a new one, named by time, in runs_dir)", mutable=True
    )
    run_name: str | None = option(None, "name for the folder of a new run (default: MODEL-DATASET)", mutable=True)
    best_model_dir: str | None = option(None, "folder for the best models (default: best/ in the run folder)")
    resume: Literal["auto", "never", "must"] = option(
        "auto",
        "auto: resume the run in model_dir if there is one; must: fail if there is none; never: fail if there is one",
        mutable=True,
    )
    checkpoint_path: str | None = option(
        None,
        "initial weights: a run or checkpoint folder, a .safetensors, .keras, .weights.h5 or .h5 file, "
        "a TensorFlow checkpoint",
    )
    checkpoint_include: Names = option(
        (), "weights of the model to load from checkpoint_path, such as 'conv*,*/kernel' (default: all)"
    )
    checkpoint_exclude: Names = option((), "weights of the model not to load from checkpoint_path, such as 'logits/*'")
    checkpoint_rename: Renames = option(
        (), "rename weights of checkpoint_path: 'regex=replacement', such as '^backbone/=,weights$=kernel'"
    )
    strict: bool = option(False, "require every weight of the model in checkpoint_path, with the same shape")
    save_every: DurationOrAuto = option(
        "auto",
        "save a checkpoint after every '500 steps', '1 epochs', '10 min'; auto: after evaluations and every 10 s, "
        "less often if saving would take more than 2 % of the time",
        mutable=True,
    )
    keep_checkpoints: int = option(3, "number of newest checkpoints to keep", mutable=True, ge=1)
    keep_best: int = option(1, "number of best models to keep", mutable=True, ge=1)
    export_at_end: Formats = option(
        (),
        "export the best model, or the last if there is none, when training ends: saved_model, keras, onnx, tflite",
        mutable=True,
    )
    hypothesis: str = option("", "what you expect of this run; written to training_log.md", mutable=True)


class Hooks(Group):
    """Hooks and logging."""

    hooks: Annotated[CallList, AfterValidator(_check_hooks)] = option(
        (),
        "'+name(...)' adds a hook to the default ones, '-name' removes one, plain names replace them; "
        "`modelyard hooks` lists them",
        mutable=True,
    )
    log_every: StepDuration = option(
        "100 steps", "log training metrics after every '100 steps' or '1 epochs'", mutable=True
    )


@dataclass(eq=False)
class GivenDataset:
    """Data that a Python program gave as the option ``dataset``: not a name, but the examples themselves."""

    data: Any


class Config(Experiment, Files, Data, Training, Evaluation, Devices, Machines, Saving, Hooks):
    """The resolved config of a run. Make one with `modelyard.load_config`."""

    component_options: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: list[str] = PrivateAttr(default_factory=list)
    _given_dataset: GivenDataset | None = PrivateAttr(None)

    def options_of(self, component: str) -> Options:
        """The typed options of the chosen "model", "dataset", "optimizer" or "learning_rate_schedule"."""
        entry = self.entry(component)
        own = {key: self.component_options[key] for key in entry.options.model_fields if key in self.component_options}
        return entry.options(**own)

    def entry(self, component: str) -> Entry:
        """The registered component that was chosen."""
        return COMPONENTS[component].get(registered_name(component, getattr(self, component)))

    def flat(self) -> dict[str, Any]:
        """All options as plain YAML values, with those of the chosen components."""
        values = self.model_dump(mode="json")
        return {**{key: values[key] for key in CORE_FIELDS}, **self.component_options}

    def defaults(self) -> dict[str, Any]:
        """The defaults of all options, with those of the chosen components."""
        values = type(self)().model_dump(mode="json")
        for component in COMPONENTS:
            options = self.entry(component).options.model_construct()  # without validation: some may have no default
            values.update(options.model_dump(mode="json", warnings=False))
        return values

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults. A run has the default of data_dir as an absolute path."""
        defaults = self.defaults()
        if self.data_dir == str(Path(defaults["data_dir"]).absolute()):
            defaults["data_dir"] = self.data_dir
        return {key: value for key, value in self.flat().items() if value != defaults.get(key)}

    def origin(self, key: str) -> str:
        """The source of an option's value, such as ``project.yaml:3``."""
        return self._origins.get(key, "default")

    @property
    def given_dataset(self) -> Any:
        """The examples that a Python program gave as ``dataset``; None if it is a name or a path."""
        return None if self._given_dataset is None else self._given_dataset.data

    @property
    def notes(self) -> list[str]:
        """Messages about options that are set and have no effect in this run."""
        return list(self._notes)


GROUPS: tuple[type[Group], ...] = (Experiment, Files, Data, Training, Evaluation, Devices, Machines, Saving, Hooks)
CORE_FIELDS = {name: info for group in GROUPS for name, info in group.model_fields.items()}


def is_mutable(key: str) -> bool:
    """Whether ``key`` may change when a run is resumed."""
    info = CORE_FIELDS.get(key)
    extra = info.json_schema_extra if info else None
    return bool(isinstance(extra, dict) and extra.get("mutable"))


PATH_DATASET = "files"
"""The registered dataset that reads a path."""
GIVEN_DATASET = "arrays"
"""The registered dataset of examples that a Python program gives."""
_FILES = re.compile(r"\.(npz|npy|csv|tfrecords?|tfrec|records?)(\.gz)?$", re.IGNORECASE)


def registered_name(component: str, name: str) -> str:
    """The name in the registry, which for a dataset given by its path is `PATH_DATASET`."""
    return PATH_DATASET if component == "dataset" and is_path(name) else name


def is_path(dataset: str) -> bool:
    """Whether a dataset is given by a path: it has a slash or the extension of a file, or it is not a registered name
    but an existing folder.
    """
    if "/" in dataset or os.sep in dataset or dataset in (".", "..") or _FILES.search(dataset):
        return True
    return dataset not in DATASETS.names() and Path(dataset).is_dir()
