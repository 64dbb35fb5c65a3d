"""The PyTorch side of `gpu.py`: the same networks, trained as fast as PyTorch can. Runs in a separate process.

The whole dataset is on the device, padded, as uint8. A batch is one gather that crops and flips. Convolutions may use
TF32, cuDNN benchmarks its algorithms, and SGD is fused.

A variant is a way to run, a memory layout and a precision, as in `graph/channels_last/float32`. The ways:
- eager;
- compiled: the network, by `torch.compile`; also with another mode of it, such as `max-autotune`;
- graph: the batch, the network and the loss by `torch.compile`, and the whole step, from taking the batch to the
  optimizer, is one CUDA graph, which is replayed;
- graph-max: the same in the mode `max-autotune-no-cudagraphs`;
- graph-eager: a CUDA graph of the step as it is, without `torch.compile`.

Without CUDA a graph's step is run as it is.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class CifarBlock(nn.Module):
    """Two 3×3 convolutions; the shortcut has no parameters (option A)."""

    def __init__(self, before: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(before, filters, 3, stride), nn.BatchNorm2d(filters)
        self.conv2, self.norm2 = conv(filters, filters, 3, 1), nn.BatchNorm2d(filters)
        self.stride, self.missing = stride, filters - before

    def forward(self, x: Tensor) -> Tensor:
        """Applies the block."""
        y = functional.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.stride > 1:
            half = self.missing // 2
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, self.missing - half))
        return functional.relu(y + x)


class Block(nn.Module):
    """A basic block, or a bottleneck with the stride in its 3×3 convolution; 1×1 projections."""

    def __init__(self, before: int, filters: int, stride: int, wide: int) -> None:
        super().__init__()
        after = filters * wide
        plan = [(before, filters, 3, stride), (filters, filters, 3, 1)]
        if wide > 1:
            plan = [(before, filters, 1, 1), (filters, filters, 3, stride), (filters, after, 1, 1)]
        self.convs = nn.ModuleList(conv(*step) for step in plan)
        self.norms = nn.ModuleList(nn.BatchNorm2d(step[1]) for step in plan)
        self.project = (
            nn.Sequential(conv(before, after, 1, stride), nn.BatchNorm2d(after))
            if stride > 1 or before != after
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Applies the block."""
        y = x
        last = len(self.convs) - 1
        for number, (convolve, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(convolve(y))
            if number < last:
                y = functional.relu(y)
        return functional.relu(y + self.project(x))


class Network(nn.Module):
    """Standardises uint8 images, then stem, blocks, pooling and a dense layer."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], features: int, classes: int) -> None:
        super().__init__()
        self.stem, self.blocks = stem, nn.Sequential(*blocks)
        self.dense = nn.Linear(features, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits."""
        x = self.blocks(self.stem((images.float() - 120.0) * (1 / 64.0)))
        logits: Tensor = self.dense(x.mean((2, 3)))
        return logits


def conv(before: int, filters: int, size: int, stride: int) -> nn.Conv2d:
    """A convolution without bias, weights as in He et al."""
    made = nn.Conv2d(before, filters, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


def stem_of(filters: int, size: int) -> list[nn.Module]:
    """The first convolution."""
    return [conv(3, filters, size, 2 if size == 7 else 1), nn.BatchNorm2d(filters), nn.ReLU()]


def resnet20(classes: int) -> Network:
    """He et al., section 4.2."""
    blocks: list[nn.Module] = []
    before = 16
    for stage in range(3):
        for block in range(3):
            filters = 16 << stage
            blocks.append(CifarBlock(before, filters, 2 if stage and not block else 1))
            before = filters
    return Network(nn.Sequential(*stem_of(16, 3)), blocks, before, classes)


def large_resnet(depths: tuple[int, ...], wide: int, stem: list[nn.Module], classes: int) -> Network:
    """The ResNets with four stages of 64 to 512 filters."""
    blocks: list[nn.Module] = []
    before = 64
    for stage, depth in enumerate(depths):
        for block in range(depth):
            filters = 64 << stage
            blocks.append(Block(before, filters, 2 if stage and not block else 1, wide))
            before = filters * wide
    return Network(nn.Sequential(*stem), blocks, before, classes)


def build(name: str, classes: int) -> Network:
    """A network by its name in Modelyard."""
    if name == "resnet20":
        return resnet20(classes)
    if name == "resnet18":
        return large_resnet((2, 2, 2, 2), 1, stem_of(64, 3), classes)
    return large_resnet((3, 4, 6, 3), 4, [*stem_of(64, 7), nn.MaxPool2d(3, 2, 1)], classes)


def load_images(path: str, side: int, count: int) -> tuple[Tensor, Tensor]:
    """Images [n, height, width, 3] and labels: those of an .npz, or noise."""
    if path:
        with np.load(path) as file:
            return torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"].reshape(-1).astype(np.int64))
    made = torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8)
    return made, torch.arange(count) % 10


class Batches:
    """Shuffled batches, cropped and flipped by one gather on the device.

    The place in the order is known here and on the device, where a captured step reads and advances it.
    """

    def __init__(self, images: Tensor, labels: Tensor, batch: int, padding: int, device: torch.device) -> None:
        self.side = images.shape[1]
        edges = (0, 0, padding, padding, padding, padding)
        self.images, self.labels = functional.pad(images.to(device), edges), labels.to(device)
        self.batch, self.padding, self.device = batch, padding, device
        self.along = torch.arange(self.side, device=device)
        self.order = torch.arange(len(labels), device=device)
        self.place, self.within = torch.zeros((), dtype=torch.int64, device=device), torch.arange(batch, device=device)
        self.at = len(labels)

    def advance(self) -> int:
        """Returns where the next batch begins. Shuffles if the epoch is over, into the same memory."""
        if self.at + self.batch > len(self.labels):
            self.order.copy_(torch.randperm(len(self.labels), device=self.device))
            self.place.zero_()
            self.at = 0
        place = self.at
        self.at += self.batch
        return place

    def restart(self) -> None:
        """The next batch is the first of an epoch."""
        self.at = len(self.labels)

    def take(self) -> tuple[Tensor, Tensor]:
        """The next batch: uint8 [batch, 3, height, width], channels last in memory, and labels."""
        place = self.advance()
        return self.cut(self.order[place : place + self.batch])

    def take_at_place(self) -> tuple[Tensor, Tensor]:
        """The batch at the place that the device knows. The caller advances both places."""
        return self.cut(self.order[self.place + self.within])

    def cut(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Crops and flips the examples of a batch."""
        moves = torch.randint(0, 2 * self.padding + 1, (2, self.batch, 1), device=self.device)
        flip = torch.rand(self.batch, 1, device=self.device) < 0.5
        down = self.along + moves[0]
        across = torch.where(flip, self.side - 1 - self.along, self.along) + moves[1]
        taken = self.images[rows[:, None, None], down[:, :, None], across[:, None, :]]
        return taken.permute(0, 3, 1, 2), self.labels[rows]


GRAPHS: dict[str, str | None] = {"graph": "default", "graph-max": "max-autotune-no-cudagraphs", "graph-eager": None}
"""The mode of `torch.compile` for each way to capture a step; None: not compiled."""
WARM_UP = 11
"""Steps before a capture: they compile, choose algorithms and make the momentum."""


def capture(step: Callable[[], Tensor], advance: Callable[[], object], device: torch.device) -> Callable[[], Tensor]:
    """Records a step in a CUDA graph and returns what replays it.

    Args:
        step: a training step that needs nothing from Python, and that frees the gradients before it begins.
        advance: what Python does before each step, outside of the graph.
        device: if it is not CUDA, the step is returned as it is.
    """
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            advance()
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # runs nothing, so there is nothing to advance
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def clear(device: torch.device) -> None:
    """Frees what another variant has left: compiled code and memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(arguments: argparse.Namespace, variant: str, batches: Batches) -> list[float]:
    """Returns images per second, one number per repeat, after compilation and warmup."""
    device = batches.device
    clear(device)
    batches.restart()
    mode, layout, *precision = variant.split("/")
    model: Any = build(arguments.model, 10).to(device)
    last = layout == "channels_last"
    if last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=device.type == "cuda")
    half = [*precision, arguments.precision][0] == "bfloat16"
    in_graph = mode in GRAPHS
    if mode != "eager" and not in_graph:
        model = torch.compile(model, mode=None if mode == "compiled" else mode)
    take = batches.take_at_place if in_graph else batches.take

    def loss_of_batch() -> Tensor:
        images, labels = take()
        if not last:
            images = images.contiguous()
        # A graph must not find weights that were cast outside of it.
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=not in_graph):
            return functional.cross_entropy(model(images), labels)

    forward = loss_of_batch
    if in_graph and GRAPHS[mode]:
        forward = torch.compile(loss_of_batch, mode=GRAPHS[mode], fullgraph=True, dynamic=False)

    def step() -> Tensor:
        # In a graph, gradients are made anew in memory of the graph; each replay overwrites them.
        optimizer.zero_grad(set_to_none=True)
        loss = forward()
        loss.backward()
        optimizer.step()
        if in_graph:
            batches.place.add_(batches.batch)
        return loss.detach()

    def run() -> Tensor:
        batches.advance()
        return replay()

    replay = capture(step, batches.advance, device) if in_graph else step
    one = run if in_graph else step

    def timed(count: int) -> float:
        wait(device)
        began = time.perf_counter()
        for _ in range(count):
            loss = one()
        wait(device)
        if not torch.isfinite(loss):
            raise ArithmeticError("the loss is not finite.")
        return time.perf_counter() - began

    return repeat(timed, arguments.warm_up, arguments.seconds, arguments.repeats, arguments.batch)


def prepare() -> torch.device:
    """Sets what makes PyTorch fast, and returns the device."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def repeat(timed: Callable[[int], float], warm_up: int, seconds: float, repeats: int, batch: int) -> list[float]:
    """Warms up, finds how many steps fill the time, and returns the speed of each repeat."""
    timed(warm_up)
    steps = max(3, round(seconds * warm_up / timed(warm_up)))
    return [steps * batch / timed(steps) for _ in range(repeats)]


def measure_all(arguments: argparse.Namespace, device: str, one: Callable[[str], list[float]]) -> None:
    """Measures variants up to the first that fails, and writes the results after each.

    `gpu.py` measures the others in a new process: a capture that failed can leave CUDA unusable.
    """
    found: dict[str, Any] = {"version": torch.__version__, "device": device, "speeds": {}, "errors": {}}
    for variant in arguments.variants.split(","):
        began = time.perf_counter()
        try:
            found["speeds"][variant] = one(variant)
        except Exception as error:  # if the compiler fails, the eager numbers still count
            found["errors"][variant] = f"{type(error).__name__}: {error}"
        print(f"{variant}: {time.perf_counter() - began:.1f} s", flush=True)
        arguments.output.write_text(json.dumps(found))
        if found["errors"]:
            return


def main() -> None:
    """Reads the options and measures the variants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--variants", required=True, help="eager/channels_last,graph/channels_last/float32,…")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--padding", type=int, default=4)
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--npz", default="")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm_up", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    device = prepare()
    images, labels = load_images(arguments.npz, arguments.side, arguments.examples)
    batches = Batches(images, labels, arguments.batch, arguments.padding, device)
    measure_all(arguments, device.type, lambda variant: measure(arguments, variant, batches))


if __name__ == "__main__":
    main()
