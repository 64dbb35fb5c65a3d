"""PyTorch from JPEG files: the `photos` part of `gpu.py`, and rows of `input.py --scaling`. Runs in a separate process.

A `DataLoader` with worker processes decodes, crops at random, resizes to 224×224 and flips, with Pillow or with
torchvision's decoder (libjpeg-turbo) and its uint8 kernels. Images travel as uint8, channels last, through pinned
memory. The order never ends, so workers do not wait at the end of an epoch. `input` measures the loader alone, `train`
ResNet-50 behind it: the next batch is copied on another stream while a step runs. With the decoder nvjpeg there are no
workers: the GPU decodes, crops and resizes.

Variants of `train` are a way to run and a decoder, as in `graph/torchvision`. The ways are those of `gpu_torch.py`;
the network and the loss are compiled together. What was read ahead while the network was compiled is not counted.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler

from gpu_torch import GRAPHS, build, capture, clear, measure_all, prepare, wait

LEAST_STEPS = 5
"""In one repeat."""


def files_of(folder: Path) -> list[tuple[Path, int]]:
    """JPEG files in a folder per class, and their labels."""
    source = folder / "train" if (folder / "train").is_dir() else folder
    classes = sorted(path for path in source.iterdir() if path.is_dir())
    return [
        (path, label)
        for label, place in enumerate(classes)
        for path in sorted(place.rglob("*"))
        if path.suffix.lower() in (".jpg", ".jpeg")
    ]


class Photos(Dataset):
    """Random crops of JPEG files: uint8 [side, side, 3] and a label."""

    def __init__(self, folder: Path, decoder: str, side: int) -> None:
        from torchvision.transforms import v2

        files = files_of(folder)
        self.paths, self.labels = [str(path) for path, _ in files], [label for _, label in files]
        self.decode = {"torchvision": decode_torchvision, "pil": decode_pillow}[decoder]
        self.change = v2.Compose([v2.RandomResizedCrop(side, antialias=True), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.change(self.decode(self.paths[index]))
        if isinstance(image, Tensor):  # it has its channels last in memory already
            return image.permute(1, 2, 0).contiguous(), self.labels[index]
        return torch.from_numpy(np.array(image)), self.labels[index]


def decode_torchvision(path: str) -> Tensor:
    """Decodes to uint8 [3, height, width]."""
    from torchvision import io

    image: Tensor = io.decode_jpeg(io.read_file(path), io.ImageReadMode.RGB)
    return image


def decode_pillow(path: str) -> Any:
    """Decodes to an image of Pillow."""
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


class Endless(Sampler):
    """Shuffled epochs, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.size).tolist()


def open_loader(arguments: argparse.Namespace, decoder: str, prefetch: int) -> Any:
    """Opens the loader of a decoder, with ``prefetch`` batches ahead in each worker."""
    photos = Photos(arguments.folder, decoder, arguments.side)
    return DataLoader(
        photos,
        arguments.batch,
        sampler=Endless(len(photos)),
        num_workers=arguments.workers,
        persistent_workers=True,
        prefetch_factor=prefetch,
        pin_memory=torch.cuda.is_available(),
        drop_last=True,
    )


def speeds_of(step: Callable[[], None], arguments: argparse.Namespace, device: torch.device, ahead: int) -> list[float]:
    """Returns images per second of each repeat. First come as many steps as may have been read ahead."""
    for _ in range(max(arguments.warm_up, ahead)):
        step()
    speeds = []
    for _ in range(arguments.repeats):
        wait(device)
        began, steps = time.perf_counter(), 0
        while steps < LEAST_STEPS or time.perf_counter() - began < arguments.seconds:
            step()
            steps += 1
        wait(device)
        speeds.append(steps * arguments.batch / (time.perf_counter() - began))
    return speeds


# -- the loader alone -----------------------------------------------------------------------------------------------


def measure_input(arguments: argparse.Namespace, variant: str) -> list[float]:
    """Measures the loader of a variant such as `pil` or `pil/4`: a decoder, and batches ahead in each worker."""
    gc.collect()  # ends the workers of the variant before
    decoder, *prefetch = variant.split("/")
    ahead = int([*prefetch, arguments.prefetch][0])
    if decoder == "nvjpeg":
        device = prepare()
        feed = DecodingFeed(arguments, device)
        try:
            return speeds_of(feed.load, arguments, device, DecodingFeed.ahead)
        finally:
            feed.close()
    batches = iter(open_loader(arguments, decoder, ahead))

    def step() -> None:
        next(batches)

    # The workers have begun with all of these before the first is here.
    return speeds_of(step, arguments, torch.device("cpu"), arguments.workers * ahead)


# -- training -------------------------------------------------------------------------------------------------------


class Feed:
    """Batches on the device; the next one is copied on another stream."""

    def __init__(self, batches: Iterator[Any], device: torch.device) -> None:
        self.batches, self.device = batches, device
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.load()

    def load(self) -> None:
        """Begins to copy the next batch, as soon as the loader has it."""
        images, labels = next(self.batches)
        with torch.cuda.stream(self.stream):  # nothing happens if it is None
            self.ready = [part.to(self.device, non_blocking=True) for part in (images, labels)]

    def take(self) -> list[Tensor]:
        """The batch that was loaded. The stream of the caller waits for it, not the caller."""
        if self.stream is not None:
            here = torch.cuda.current_stream()
            here.wait_stream(self.stream)
            for part in self.ready:
                part.record_stream(here)
        return self.ready

    def close(self) -> None:
        """The workers end with the loader."""


class DecodingFeed:
    """Batches whose JPEGs are decoded by nvJPEG, by a thread and on a stream of their own."""

    ahead = 2

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.files, self.batch, self.side = files_of(arguments.folder), arguments.batch, arguments.side
        self.device, self.closed = device, False
        self.made: queue.Queue[Any] = queue.Queue(self.ahead)
        self.ready: list[Tensor] = []
        self.pool = ThreadPoolExecutor(8)
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        self.load()

    def work(self) -> None:
        """Makes batches until it is closed. An error is put in place of a batch."""
        try:
            stream = torch.cuda.Stream() if self.device.type == "cuda" else None
            with torch.cuda.stream(stream):
                order = iter(Endless(len(self.files)))
                coming = self.read(order)
                while not self.closed:
                    files, coming = coming, self.read(order)
                    made = self.make([future.result() for future in files])
                    self.made.put((made, stream.record_event() if stream else None))
        except Exception as error:
            self.made.put(error)

    def read(self, order: Iterator[int]) -> list[Any]:
        """Begins to read the files of a batch."""
        return [self.pool.submit(read_file, *self.files[index]) for index in itertools.islice(order, self.batch)]

    def make(self, files: list[tuple[Tensor, int]]) -> list[Tensor]:
        """Decodes, crops, resizes and flips a batch."""
        from torchvision import io

        images = io.decode_jpeg([data for data, _ in files], io.ImageReadMode.RGB, device=self.device)
        small = torch.cat([self.cut(image) for image in images])
        flip = torch.rand(len(small), 1, 1, 1, device=self.device) < 0.5
        flipped = torch.where(flip, small.flip(3), small).round().clamp(0, 255).to(torch.uint8)
        labels = torch.tensor([label for _, label in files])
        return [flipped.permute(0, 2, 3, 1).contiguous(), labels.to(self.device)]

    def cut(self, image: Tensor) -> Tensor:
        """A random crop, resized: float [1, 3, side, side]."""
        from torchvision.transforms import RandomResizedCrop

        top, left, high, wide = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
        part = image[None, :, top : top + high, left : left + wide].float()
        return functional.interpolate(part, (self.side, self.side), mode="bilinear", antialias=True)

    def load(self) -> None:
        """Waits until the next batch is under way."""
        got = self.made.get()
        if isinstance(got, Exception):
            raise got
        self.ready, self.event = got

    def take(self) -> list[Tensor]:
        """The batch that was loaded. The stream of the caller waits for it, not the caller."""
        if self.event is not None:
            here = torch.cuda.current_stream()
            here.wait_event(self.event)
            for part in self.ready:
                part.record_stream(here)
        return self.ready

    def close(self) -> None:
        """Ends the thread."""
        self.closed = True
        while self.thread.is_alive():
            try:
                self.made.get(timeout=0.1)
            except queue.Empty:
                continue
        self.pool.shutdown()


def read_file(path: Path, label: int) -> tuple[Tensor, int]:
    """Returns the bytes of a file, and its label."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8), label


def measure_training(arguments: argparse.Namespace, variant: str, device: torch.device) -> list[float]:
    """Measures ResNet-50 behind the loader."""
    clear(device)
    mode, decoder, *prefetch = variant.split("/")
    ahead = int([*prefetch, arguments.prefetch][0])
    in_graph = mode in GRAPHS
    model: Any = build("resnet50", arguments.classes).to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=device.type == "cuda")

    half = arguments.precision == "bfloat16"

    def loss_of_batch(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            return functional.cross_entropy(model(images.permute(0, 3, 1, 2)), labels)

    forward = loss_of_batch
    compiled = GRAPHS[mode] if in_graph else None if mode == "eager" else "default"
    if compiled:
        forward = torch.compile(loss_of_batch, mode=compiled, fullgraph=True, dynamic=False)

    def train(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(images, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    shape = (arguments.batch, arguments.side, arguments.side, 3)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    labels = torch.randint(0, arguments.classes, (arguments.batch,), device=device)
    # Before the loader begins: while a step is captured, no other thread may use CUDA.
    replay = capture(lambda: train(images, labels), lambda: None, device) if in_graph else None
    for _ in range(3):  # compiles
        train(images, labels) if replay is None else replay()
    wait(device)
    feed: Feed | DecodingFeed
    if decoder == "nvjpeg":
        feed = DecodingFeed(arguments, device)
    else:
        feed = Feed(iter(open_loader(arguments, decoder, ahead)), device)
    loss = torch.zeros(())

    def step() -> None:
        nonlocal loss
        taken = feed.take()
        if replay is None:
            loss = train(*taken)
        else:
            images.copy_(taken[0])
            labels.copy_(taken[1])
            loss = replay()
        feed.load()

    try:
        speeds = speeds_of(step, arguments, device, arguments.workers * ahead)
    finally:
        feed.close()
    if not torch.isfinite(loss):
        raise ArithmeticError("the loss is not finite.")
    return speeds


def main() -> None:
    """Reads the options and measures the variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["input", "train"])
    parser.add_argument("--folder", type=Path, required=True, help="folder per class of JPEGs")
    parser.add_argument("--variants", required=True, help="input: pil/2,torchvision/4,…; train: graph/torchvision/4,…")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prefetch", type=int, default=2, help="batches ahead in each worker, if a variant names none")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm_up", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.classes = 1 + max(label for _, label in files_of(arguments.folder))
    device = prepare() if arguments.part == "train" else torch.device("cpu")
    if arguments.part == "input":
        measure_all(arguments, device.type, lambda variant: measure_input(arguments, variant))
    else:
        measure_all(arguments, device.type, lambda variant: measure_training(arguments, variant, device))


if __name__ == "__main__":
    main()
