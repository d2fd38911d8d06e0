"""A `.bin`, `.pt` or `.pth` file, loaded without running any pickled code."""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from merganser.checkpoints.lfs_pointers import refuse_lfs_pointer
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.torch_archive import read_torch_archive
from merganser.errors import CheckpointError
from merganser.excerpts import list_some, shorten
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_NAME = 300
_PICKLES = 5  # pickles in a file of torch's format before archives
#: Objects that trainers save beside the weights, such as run settings, which are not needed.
_TRAINERS = re.compile(
    r"(lightning|pytorch_lightning|lightning_fabric|omegaconf|hydra)\.|argparse\.Namespace$|pathlib\.\w*Path$|"
    r"(collections\.defaultdict|typing\.Any|enum\.\w+|torch\.device|torch\.Size|builtins\.(list|int|float|str|bool))$"
)
_NESTED = ("state_dict", "model_state_dict", "model", "module")


class TorchFile(StateDict):
    """A torch file, memory-mapped if its format allows. Unwraps a dict nested under `state_dict` or `model`, and
    leaves out objects that trainers save, such as Lightning's hyper-parameters.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        super().__init__(_unwrap(_load(self.path), self.path), str(path))
        self.directory = self.path.parent
        size = self.path.stat().st_size
        if large := [name for name in self.names() if self.spec(name).nbytes > size]:
            raise CheckpointError(
                f"{path}: {large[0]!r} is {self.spec(large[0])}, larger than the whole file: its entries share memory; "
                "save it as a contiguous tensor"
            )

    def files(self) -> Sequence[Path]:
        return (self.path,)


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"
            if not zipped:
                file.seek(0)
                _check_names(file, path)
        if zipped:
            _check_archive(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        refuse_lfs_pointer(path)
        if zipped and (content := _load_without_objects(path)) is not None:
            return content
        raise CheckpointError(
            f"{path}: refused: the pickle wants to run code or is damaged ({_reason(error)}). "
            "If you trust its author, load it yourself and save it as safetensors."
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: not a readable torch file: {_reason(error)}") from None


def _load_without_objects(path: Path) -> Any:
    """Return the tensors of a trainer's checkpoint without its objects; None if it names unknown ones."""
    try:
        return read_torch_archive(path, lambda named: _TRAINERS.match(named) is not None)[0]
    except (OSError, ValueError):
        return None


def _reason(error: Exception) -> str:
    """Return the line of a message with the cause: torch puts advice before it."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return next((line for line in lines if line.startswith("WeightsUnpickler error")), lines[0])[:300]


def _check_archive(path: Path) -> None:
    """Refuse an archive that torch would decompress in memory, or map as if it were uncompressed."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if packed := [record for record in records if record.compress_type != zipfile.ZIP_STORED]:
            raise CheckpointError(
                f"{path}: {packed[0].filename!r} is compressed, which torch.save never does; if you trust its author, "
                "load it yourself and save it again"
            )
        held = sum(record.file_size for record in records)
        if held > path.stat().st_size:
            raise CheckpointError(
                f"{path}: its records claim {held} bytes, more than the file has; the file is damaged"
            )
        for record in records:
            if record.filename.endswith("data.pkl"):
                with archive.open(record) as file:
                    _check_names(file, path)


def _check_names(file: IO[bytes], path: Path) -> None:
    """Refuse pickles with extremely long names: torch needs quadratic time to reject them."""
    for _ in range(_PICKLES):
        try:
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in ("GLOBAL", "INST") and len(str(argument)) > _LONGEST_NAME:
                    raise CheckpointError(
                        f"{path}: refused: the pickle asks for {shorten(str(argument), 60, 'start')!r}"
                    )
        except (ValueError, OverflowError):  # not a pickle, or the end; torch reports the error
            return


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: contains a {type(content).__name__}, not a dict of tensors")
    if not any(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError(f"{path}: contains no tensors (keys: {list_some([*map(str, content)], 5)})")
    return content
