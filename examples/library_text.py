"""Real text that every machine with Python has: the source of Python's own library, as pieces for a language model.

A piece is a byte or a pair of pieces that is frequent (byte-pair encoding; Sennrich et al. 2016, Radford et al. 2019).
The pairs are learnt here, by counting in numpy: a second or two for a million bytes, and the same result on every rank.
Files for training and held-out files are different files. Tests of the library are left out: not every system has them.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

__all__ = ["IGNORED", "MASK", "MaskedText", "Text", "library_text"]

Pieces = npt.NDArray[np.int64]

MASK = 256  # after the 256 bytes; the pairs follow
IGNORED = -100  # the label that cross entropy passes over
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


class Text(NamedTuple):
    """Text as pieces, and where it came from."""

    training: Pieces
    held_out: Pieces
    num_files: int
    num_bytes: int


def library_text(vocabulary: int, training_bytes: int = 1_000_000, held_out_bytes: int = 60_000) -> Text:
    """Read files of the library and cut them into pieces; the held-out part comes from one file in ten.

    Args:
        vocabulary: Number of pieces, the 256 bytes and the mask included.
        training_bytes: How much text to train on.
        held_out_bytes: How much text to hold out.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(folder).parts))
    random.Random(0).shuffle(files)  # in the order of names the text would be of a few large packages only
    held_out, _ = _read(files[::10], held_out_bytes)
    training, num_files = _read([path for i, path in enumerate(files) if i % 10], training_bytes)
    return Text(*_into_pieces(training, held_out, vocabulary), num_files, len(training))


def _read(files: list[Path], num_bytes: int) -> tuple[Pieces, int]:
    text = bytearray()
    num_files = 0
    while len(text) < num_bytes and num_files < len(files):
        text += files[num_files].read_bytes()
        num_files += 1
    return np.frombuffer(bytes(text[:num_bytes]), np.uint8).astype(np.int64), num_files


def _into_pieces(training: Pieces, held_out: Pieces, vocabulary: int) -> tuple[Pieces, Pieces]:
    """Join the most frequent pair of the training text, again and again, in both texts."""
    for new in range(MASK + 1, vocabulary):
        counts = np.bincount(training[:-1] * vocabulary + training[1:])
        left, right = divmod(int(counts.argmax()), vocabulary)
        training, held_out = (_join(text, left, right, new) for text in (training, held_out))
    return training, held_out


def _join(text: Pieces, left: int, right: int, new: int) -> Pieces:
    starts = np.flatnonzero((text[:-1] == left) & (text[1:] == right))
    # "aaa" matches "aa" twice, at neighbouring places: of such a run every second match counts, from the first one on.
    place = np.arange(len(starts))
    begins_run = np.diff(starts, prepend=-2) != 1
    starts = starts[(place - np.maximum.accumulate(np.where(begins_run, place, 0))) % 2 == 0]
    text = text.copy()
    text[starts] = new
    return np.delete(text, starts + 1)


class MaskedText(Dataset[dict[str, torch.Tensor]]):
    """Stretches of text with some pieces hidden, and the hidden ones as labels.

    Which are hidden depends on the seed and the sample's number alone, so that it is the same whichever rank loads it.

    Args:
        text: The pieces.
        length: Pieces of a sample.
        vocabulary: Number of pieces.
        seed: Of the masks.
    """

    def __init__(self, text: Pieces, length: int, vocabulary: int, seed: int) -> None:
        self._samples = text[: len(text) // length * length].reshape(-1, length)
        self._vocabulary, self._seed = vocabulary, seed

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """BERT's masking: of 15 % of the pieces 80 % become the mask, 10 % any piece, and 10 % stay."""
        pieces = self._samples[index]
        numbers = np.random.default_rng((self._seed, index))
        chosen, fate = numbers.random((2, len(pieces)))
        hidden = chosen < 0.15
        anything = numbers.integers(self._vocabulary, size=len(pieces))
        seen = np.where(hidden & (fate < 0.8), MASK, np.where(hidden & (fate < 0.9), anything, pieces))
        labels = np.where(hidden, pieces, IGNORED)
        return {"input_ids": torch.from_numpy(seen), "labels": torch.from_numpy(labels)}
