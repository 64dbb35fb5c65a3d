"""Compiles programs, and caches them on disk."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import jax

from modelyard import storage
from modelyard.config.schema import Config

log = logging.getLogger("modelyard")
_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([^']+)'")
_LOCK_DIGITS = 3
"""Hexadecimal digits in the name of a lock, so that there are not more and more of them."""
_MOST_WAITING_SECONDS = 900.0
_PAUSE_SECONDS = 0.05
_own: set[str] = set()
"""Cache folders that are ours, not the user's."""


def use_cache(config: Config) -> None:
    """Turns on JAX's compilation cache in our own folder, unless the user has set one up."""
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    # Programs for a CPU hold its instructions: a home folder shared by machines has a cache per type of CPU.
    kind = hashlib.sha256(f"{platform.machine()} {_cpu_flags()}".encode()).hexdigest()[:12]
    folder = storage.cache_folder(config.cache_dir) / "compiled" / kind
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        log.warning("compiled programs are not kept for the next run: cannot make %s (%s)", folder, error)
        return
    if state.st_mode & 0o022 or (hasattr(os, "getuid") and state.st_uid != os.getuid()):
        log.warning("compiled programs are not kept for the next run: other users may write to %s", folder)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    _own.add(str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


_RECORDED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
"""Operations that XLA may record as a CUDA graph: those of its default, and loops, such as ours over steps."""
_NOT_KNOWN = ("No such compile option", "While setting option")
"""Words in XLA's errors if it does not know an option, or a value of it."""


def compile_all(lowered: Sequence[Any], autotune: bool = True, replicas: int = 1) -> list[Any]:
    """Compiles programs in parallel, since much of compiling runs in one thread.

    Args:
        lowered: the lowered programs.
        autotune: whether kernels for GPUs are chosen by measuring them.
        replicas: the number of devices that a program runs on.
    """

    def compiled(program: Any) -> Any:
        with _alone(program):
            return compiled_here(program)

    def compiled_here(program: Any) -> Any:
        options = _compiler_options(autotune, replicas)
        while True:
            try:
                return program.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                named = [name for name in options if name in str(error)]
                if not named or not any(words in str(error) for words in _NOT_KNOWN):
                    raise
                log.debug("compiled without %s, which this version of XLA does not know: %s", ", ".join(named), error)
                options = {name: value for name, value in options.items() if name not in named}

    with _repaired_cache(), ThreadPoolExecutor(len(lowered)) as pool:
        return list(pool.map(compiled, lowered))


def _compiler_options(autotune: bool, replicas: int) -> dict[str, int | bool | str]:
    """Returns options of XLA for GPUs, except those that the user has set in XLA_FLAGS."""
    if jax.default_backend() != "gpu":
        return {}
    # Measured on an H200: 24 s instead of 30, and steps as fast. Level 1 does not compare the results of kernels, which
    # only leads to warnings. Fusions are XLA's own kernels; trying Triton for them gains nothing.
    options: dict[str, int | bool | str] = {
        "xla_gpu_autotune_level": 1,
        "xla_gpu_experimental_enable_fusion_autotuner": False,
    }
    if not autotune:
        options = {"xla_gpu_exclude_nondeterministic_ops": True}  # XLA then takes the first kernel that fits
    if replicas == 1:  # not tried on several
        options["xla_gpu_enable_command_buffer"] = _RECORDED
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


@contextmanager
def _alone(program: Any) -> Iterator[None]:
    """Lets no other process of this machine compile the same program while the block runs: it finds it in the cache.

    Two that search for the fastest kernels at once may choose others, and their results differ in the last bits. The
    system releases the lock of a process that is killed. Where there can be no lock, there is none.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder not in _own or jax.process_count() > 1:
        yield
        return
    name = hashlib.sha256(program.as_text().encode()).hexdigest()[:_LOCK_DIGITS]
    try:
        lock = open(Path(folder) / f"lock-{name}", "ab")  # noqa: SIM115 - it is closed below
    except OSError as error:
        log.debug("compiling without a lock: %s", error)
        yield
        return
    with lock:
        _wait_for(lock)
        yield


def _wait_for(lock: BinaryIO) -> None:
    """Waits until no other process has the lock, but not forever: one that hangs could have it."""
    began, told = time.monotonic(), False
    while time.monotonic() - began < _MOST_WAITING_SECONDS:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                log.info("another process compiles this program; waiting for it …")
            told = True
            time.sleep(_PAUSE_SECONDS)
        except OSError as error:  # a file system without locks
            log.debug("compiling without a lock: %s", error)
            return
    log.warning("another process has compiled this program for %d s; compiling it here", _MOST_WAITING_SECONDS)


@contextmanager
def _repaired_cache() -> Iterator[None]:
    """Removes entries of our cache that JAX cannot read, while the block runs.

    JAX writes entries in place, so a full disk or a kill can leave half of one. It then warns, compiles, and keeps the
    entry, so that every later run compiles again. The warning comes before the new program is written.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _UNREADABLE.pattern)
        shown = warnings.showwarning

        def show(message: Any, *rest: Any, **named: Any) -> None:
            folder = jax.config.jax_compilation_cache_dir
            found = _UNREADABLE.search(str(message))
            if found is None or folder not in _own:
                shown(message, *rest, **named)
                return
            log.warning("a program in the cache %s is damaged and is compiled again", folder)
            # The warning does not have its full name; others with this prefix are compiled once more, too.
            for path in Path(folder).glob(f"{found[1]}-*"):
                path.unlink(missing_ok=True)

        warnings.showwarning = show
        yield


_HIT, _MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


@contextmanager
def counted_compilations() -> Iterator[dict[str, int]]:
    """Counts the programs that are found in the cache and those that are compiled, while the block runs."""
    counts = {"found": 0, "compiled": 0}

    def note(event: str, **_: Any) -> None:
        if event in (_HIT, _MISS):
            counts["found" if event == _HIT else "compiled"] += 1

    jax.monitoring.register_event_listener(note)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(note)
