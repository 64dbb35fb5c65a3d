"""Commands for data: what may stand behind each word."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from modelyard.cli.given import Json, given

Source = Annotated[str, typer.Argument(metavar="DATASET", help="a path, or the name of a dataset")]


def convert(
    ctx: typer.Context,
    source: Annotated[str, typer.Option("--from", metavar="SOURCE", help="a path, or the name of a dataset")],
    to: Annotated[str, typer.Option(metavar="FOLDER", help="the folder to make")],
    encoding: Annotated[str, typer.Option(metavar="keep|jpeg|raw", help="original bytes, JPEG, or pixels")] = "keep",
    max_edge: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--max_edge", help="make images smaller whose longer edge is longer", min=1),
    ] = None,
    quality: Annotated[int, typer.Option(help="of JPEGs that have to be encoded", min=1, max=100)] = 95,
    shards: Annotated[Optional[int], typer.Option(help="files a split (default: about 128 MB each)", min=1)] = None,  # noqa: UP045
    validation_fraction: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--validation_fraction", help="share of each class to set aside (default: splits stay)"),
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="of the dataset (default: that of the folder)")] = None,  # noqa: UP045
    processes: Annotated[int, typer.Option(help="0: as many as there are cores; the bytes are the same", min=0)] = 0,
    on_bad: Annotated[
        str, typer.Option("--on_bad", metavar="fail|skip", help="what to do with an image that can't be read")
    ] = "fail",
    json: Json = False,
) -> None:
    """Turn any source into records with an index, labels and a dataset.json. Killed, it goes on when started again."""
    from modelyard.cli import data

    settings = {
        "encoding": encoding,
        "max_edge": max_edge,
        "quality": quality,
        "shards": shards,
        "validation_fraction": validation_fraction,
        "name": name,
        "processes": processes,
        "on_bad": on_bad,
    }
    data.convert(source, to, settings, given(ctx), as_json=json)


def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist, fashion_mnist, cifar10 or cifar100")],
    data_dir: Annotated[str, typer.Option("--data_dir", help="folder for the files")] = "data",
    archive: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--from", metavar="ARCHIVE", help="a local copy: the file, or a folder with the files"),
    ] = None,
) -> None:
    """Bring the official files of a dataset, checked; a broken download goes on."""
    from modelyard.cli import data

    data.fetch(name, data_dir, archive)


def data_info(ctx: typer.Context, source: Source, json: Json = False) -> None:
    """Show splits, classes and sizes; of records, the features they have."""
    from modelyard.cli import data

    data.info(source, given(ctx), as_json=json)


def data_verify(ctx: typer.Context, source: Source, json: Json = False) -> None:
    """Read everything: every checksum, every image, the labels; list what is wrong."""
    from modelyard.cli import data

    data.verify(source, given(ctx), as_json=json)


def data_show(
    ctx: typer.Context,
    source: Source,
    output: Annotated[str, typer.Option(help="the PNG file to write")] = "sheet.png",
    split: Annotated[str, typer.Option(metavar="train|validation|test", help="which split")] = "train",
    examples: Annotated[int, typer.Option(help="how many", min=1, max=200)] = 8,
    copies: Annotated[int, typer.Option(help="how often each is shown augmented", min=0, max=20)] = 5,
) -> None:
    """Make a picture of examples, as they are and as training sees them."""
    from modelyard.cli import data

    data.show(source, output, split, examples, copies, given(ctx))
