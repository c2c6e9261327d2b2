"""Read cases fully, and check them; a training prepares these volumes, so no file is decompressed twice.

The faults of all cases are reported at once, each in one sentence.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from monai.data import MetaTensor

from volseg.data.cases import Case, Split, Task
from volseg.data.checks.kinds import KINDS, Finding
from volseg.data.checks.volumes import (
    Fault,
    LabelValues,
    check_grid,
    check_image_voxels,
    check_label_place,
    check_label_voxels,
    count_values,
    holds_labels_only,
    resembles_labels,
)
from volseg.data.readers import Files, list_case_files, list_files, name_files, read_label, read_volume
from volseg.data.threads import map_in_threads
from volseg.errors import DamagedFileError, DataError, LargeVolumeError
from volseg.formatting import list_some
from volseg.parallel.processes.progress import report_progress

LABEL_VALUES = {"label-undeclared", "label-fractions"}
"""Kinds of findings that an image in place of a label causes."""

NO_VALUES = {"not-finite", "constant"}
"""Kinds of problems after which an image is not compared with label maps."""


@dataclass(frozen=True, kw_only=True)
class CheckedCase:
    """A case that was read, and its findings."""

    case: Case
    """The case with volumes in place of paths; a field that cannot be read keeps its path."""
    problems: tuple[Finding, ...] = ()
    """Findings that make the case unusable."""
    remarks: tuple[Finding, ...] = ()
    digest: str | None = None
    """Digest of the image's voxels, whatever the file's name and format; None without an image."""
    label_digest: str | None = None
    fingerprint: str = ""
    """Digest that changes with any voxel of image and label, and with the place of either in the patient."""
    label_counts: Mapping[int, int] = field(default_factory=dict)
    """Voxels of each value of the label."""


def check_case(case: Case, task: Task) -> list[Finding]:
    """Read a case fully and return the findings that make it unusable.

    A case without ``label`` is checked as a case to predict.
    """
    return list(read_case(case, task).problems)


def read_case(case: Case, task: Task, *, digests: bool = True) -> CheckedCase:
    """Read a case fully, and check it.

    Any error is reported as a problem of the case, so that no error hides others. The digest of a large image takes as
    long as reading it, and a prediction does not need it.
    """
    found: list[Finding] = []
    volumes: dict[str, MetaTensor] = {}
    values: LabelValues | None = None

    def check_image(image: MetaTensor) -> Iterator[Fault]:
        return check_image_voxels(image, task)

    def check_label(label: MetaTensor) -> Iterator[Fault]:
        nonlocal values
        values = count_values(label.as_tensor())
        return check_label_voxels(label, values, task, case)

    def read_own_label(files: Files) -> MetaTensor:
        return read_label(files, volumes.get("image", case.get("image")), task)

    for name, read, check in (("image", read_volume, check_image), ("label", read_own_label, check_label)):
        if name in case:
            report_progress("read", item=case["case"])
            volume, faults = _read_field(case, name, read, check)
            found.extend(faults)
            if volume is not None:
                volumes[name] = volume
    found_digests = {name: digest_voxels(volume) for name, volume in volumes.items()} if digests else {}
    found = _compare_fields(case, task, volumes, found_digests, found)
    found = list(dict.fromkeys(found))
    looks = [finding for finding in found if finding.severity == "look"]
    return CheckedCase(
        case={**case, **volumes},
        problems=tuple(finding for finding in found if finding.severity == "bad"),
        # Image and label share a grid, so an equal remark about both counts once.
        remarks=tuple({(one.kind, one.message): one for one in reversed(looks)}.values())[::-1],
        digest=found_digests.get("image"),
        label_digest=found_digests.get("label"),
        fingerprint=_fingerprint(found_digests, volumes) if digests else "",
        label_counts={} if values is None else values.counts,
    )


def _read_field(
    case: Case, name: str, read: Callable[[Files], MetaTensor], check: Callable[[MetaTensor], Iterator[Fault]]
) -> tuple[MetaTensor | None, list[Finding]]:
    """Read a field; return its volume, or None if it cannot be read or checked, and its findings."""
    files = list_files(case[name])
    named = name_files(case[name])

    def bad(kind: str, message: str) -> tuple[None, list[Finding]]:
        meant = next((file for file in files if str(file) in message), files[0])
        return None, [Finding(case["case"], meant, message, kind)]

    try:
        volume = read(case[name])
        faults = [*check_grid(volume), *check(volume)]
    except DataError as fault:
        return bad(_name_fault(fault, files), str(fault))
    except MemoryError:
        return bad("no-memory", f"{named} needs more memory for the check than is free; crop or resample it")
    except Exception as fault:  # such as torch's RuntimeError if memory runs out
        message = f"{named} cannot be checked ({type(fault).__name__}: {fault})".partition("\n")[0]
        return bad("unreadable", f"{message}; leave it out")
    return volume, [_describe(case, name, fault) for fault in faults]


def _name_fault(fault: DataError, files: tuple[Path, ...]) -> str:
    if isinstance(fault, DamagedFileError):
        return "truncated"
    if isinstance(fault, LargeVolumeError):
        return "no-memory"
    return "unreadable" if all(file.exists() for file in files) else "missing-file"


def _describe(case: Case, name: str, fault: Fault) -> Finding:
    files = list_files(case[name])
    one_each = fault.channel is not None and len(files) > fault.channel
    file = files[fault.channel] if one_each and fault.channel is not None else files[0]
    is_bad = KINDS[fault.kind].severity == "bad"
    return Finding(case["case"], file, f"{name_files(case[name])} {fault.text}" if is_bad else fault.text, fault.kind)


def _compare_fields(
    case: Case, task: Task, volumes: Mapping[str, MetaTensor], digests: Mapping[str, str], found: list[Finding]
) -> list[Finding]:
    """Return the findings; a mix-up of image and label replaces the findings that it explains."""
    image, label = volumes.get("image"), volumes.get("label")
    if image is not None and label is not None:
        if fault := check_label_place(image, label):
            found = [*found, _describe(case, "label", fault)]
        others = [finding for finding in found if finding.kind not in LABEL_VALUES]
        if digests and digests["image"] == digests["label"]:
            text = "contains the same voxels as its image; name two different files"
            return [*others, _describe(case, "label", Fault("image-is-label", text))]
        if len(others) < len(found) and holds_labels_only(image.as_tensor(), task):
            text = "contains only label values, but its label contains others; name them the other way round"
            return [*others, _describe(case, "image", Fault("swapped", text))]
    if image is None or any(finding.kind in NO_VALUES for finding in found):
        return found
    is_like_label = holds_labels_only(image.as_tensor(), task) or resembles_labels(image.as_tensor())
    return [*found, _describe(case, "image", Fault("image-like-label", ""))] if is_like_label else found


def digest_voxels(volume: MetaTensor) -> str:
    """Return `CheckedCase.digest` of an image."""
    voxels = volume.as_tensor().contiguous().numpy()
    digest = sha256(repr(voxels.shape).encode())
    digest.update(voxels)
    return digest.hexdigest()


def _fingerprint(digests: Mapping[str, str], volumes: Mapping[str, MetaTensor]) -> str:
    """Return `CheckedCase.fingerprint`."""
    parts = [str(digests.get("image")), digests.get("label", "")]
    places = [volume.affine.to(torch.float64).contiguous().numpy().tobytes() for volume in volumes.values()]
    return sha256("".join(parts).encode() + b"".join(places)).hexdigest()


BYTES_PER_STORED = 12
"""Memory for reading and checking, per stored byte: voxels, float32 copies in two orders, masks (uint8: 11.7)."""


def expect_bytes(case: Case) -> int:
    """Return the approximate memory for reading a case, estimated from the sizes of its files."""
    return BYTES_PER_STORED * sum(map(_stored_bytes, list_case_files(case)))


def _stored_bytes(path: Path) -> int:
    try:
        if path.is_dir():
            return sum(file.stat().st_size for file in path.iterdir())
        size = path.stat().st_size
        if path.suffix.lower() != ".gz" or size < 4 or not path.is_file():
            return size
        with path.open("rb") as file:  # gzip's last four bytes: the uncompressed size, up to 4 GiB
            file.seek(-4, 2)
            return max(size, int.from_bytes(file.read(4), "little"))
    except OSError:  # its reader reports the fault
        return 0


def check_cases(
    cases: Sequence[Case], task: Task, *, workers: int | None = None, progress: Callable[[], object] | None = None
) -> list[Finding]:
    """Check all cases; an empty list means that all are usable.

    `check_task` also finds the faults that only a comparison of cases shows.

    Parameters
    ----------
    cases, task
        As for `check_case`.
    workers
        Threads; see `map_in_threads`.
    progress
        Called after each case, for instance ``bar.update``.
    """
    problems: list[Finding] = []
    for found in map_in_threads(partial(check_case, task=task), cases, workers):
        problems.extend(found)
        if progress is not None:
            progress()
    return problems


def summarise_remarks(remarks: Sequence[Finding], most: int = 3) -> list[str]:
    """Return a line per kind: number of cases, description, remedy, and the first names."""
    by_kind: dict[str, list[Finding]] = defaultdict(list)
    for remark in remarks:
        by_kind[remark.kind].append(remark)
    return [summarise_kind(kind, same, most) for kind, same in by_kind.items()]


def summarise_kind(kind: str, same: Sequence[Finding], most: int = 3) -> str:
    """Return the line for the findings of one kind."""
    says = f"{KINDS[kind].says}; {KINDS[kind].remedy}"
    cases = {remark.case for remark in same if remark.case}
    who = f"{len(cases)} case(s)" if cases else "data set"
    shown = [f"{one.case} ({one.message})" if one.case and one.message else one.case or one.message for one in same]
    return f"{who}: {says}: {list_some(shown, most)}"


def require_sound(
    problems: Sequence[Finding], remedy: str = "fix them, or set data.skip_bad to leave them out of training"
) -> None:
    """Raise one error that names every bad case, and the remedy.

    Raises
    ------
    DataError
        If there is a problem; one line each.
    """
    if problems:
        cases = len({problem.case for problem in problems})
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise DataError(f"{cases} case(s) cannot be used:\n{lines}\n{remedy}")


def group_equal_images(digests: Iterable[tuple[Case, str]]) -> list[list[Case]]:
    """Return the groups of cases with the same voxels, from pairs of a case and its digest."""
    cases: dict[str, list[Case]] = defaultdict(list)
    for case, digest in digests:
        cases[digest].append(case)
    return [same for same in cases.values() if len(same) > 1]


def remark_on_same_images(digests: Iterable[tuple[Case, str]]) -> list[Finding]:
    """Remark on images that several cases share."""
    remarks = []
    for first, *rest in group_equal_images(digests):
        crosses = any(("label" in first) != ("label" in case) for case in rest)
        also = f"also {list_some([case['case'] for case in rest])}"
        kind = "trains-and-tests" if crosses else "same-image"
        remarks.append(Finding.of(first, kind, also))
    return remarks


def refuse_held_out(
    digests: Iterable[tuple[Case, str]], validation: Container[str], where: str = ""
) -> dict[str, list[Finding]]:
    """Return problems of training cases whose image is also in validation: the network would have memorised it.

    Parameters
    ----------
    digests
        Pairs of a case and its digest, on both sides of the split.
    validation
        Ids of the validation cases.
    where
        Name of the split, for the message.
    """
    refused: dict[str, list[Finding]] = {}
    for same in group_equal_images(digests):
        held_out = [case["case"] for case in same if case["case"] in validation]
        for case in same if held_out else ():
            if case["case"] not in validation:
                message = (
                    f"{name_files(case['image'])} contains the same voxels as the validation case {held_out[0]}"
                    f"{where}; keep one of them, or put both on the same side of the split"
                )
                refused[case["case"]] = [Finding.of(case, "leak", message)]
    return refused


def report_leaks(digests: Sequence[tuple[Case, str]], splits: Sequence[Split]) -> list[Finding]:
    """Return a problem for each case that trains in a fold in which its image validates."""
    found: dict[str, Finding] = {}
    for number, split in enumerate(splits):
        leaks = refuse_held_out(digests, set(split.validation), f" of fold {number}")
        for name, [leak] in leaks.items():
            found.setdefault(name, leak)
    return list(found.values())
