"""Tables of paths in the forms that spreadsheets and scripts write."""

import json
import logging

import pytest

from volseg.data import Split
from volseg.data.layouts import load_task
from volseg.data.layouts.table import read_images
from volseg.errors import DataError

NAMES = {"labels": {"background": 0, "lesion": 1, "organ at risk": 2}}


@pytest.fixture
def table(tmp_path):
    """Return a function that writes a table next to the files x.nii, y.nii ... that it may list."""
    for name in ("x", "x2", "xl", "y", "y2", "yl", "z", "z2", "zl"):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / f"files/{name}.nii").touch()
    (tmp_path / "dataset.json").write_text(json.dumps(NAMES), encoding="utf-8")

    def write(text, name="cases.csv", encoding="utf-8"):
        (tmp_path / name).write_bytes(text.encode(encoding))
        return tmp_path / name

    return write


PLAIN = "case,image,label\nb,files/y.nii,files/yl.nii\na,files/x.nii,files/xl.nii\n"


QUOTED = '"Case", "Image",  Label\n\n"b", "files/y.nii",files/yl.nii \n,,\n a ,./files//x.nii,"files/xl.nii"'
INDEXED = ",case,image,label,age\n0,b,files/y.nii,files/yl.nii,71\n1,a,files/x.nii,files/xl.nii,\n"
WRITTEN = {
    "plain": (PLAIN, "cases.csv", "utf-8"),
    "byte order mark": (PLAIN, "CASES.CSV", "utf-8-sig"),
    "CRLF": (PLAIN.replace("\n", "\r\n"), "cases.csv", "utf-8"),
    "semicolons": (PLAIN.replace(",", ";"), "cases.csv", "utf-8"),
    "tabs": (PLAIN.replace(",", "\t"), "cases.csv", "utf-8"),
    "TSV": (PLAIN.replace(",", "\t"), "cases.tsv", "utf-8"),
    "quotes and blanks": (QUOTED, "c.csv", "utf-8"),
    "backslashes": (PLAIN.replace("files/", "files\\"), "cases.csv", "utf-8"),
    "order": ("label,image,case\nfiles/yl.nii,files/y.nii,b\nfiles/xl.nii,files/x.nii,a", "c.csv", "utf-8"),
    "pandas": (INDEXED, "c.csv", "utf-8"),
}


@pytest.mark.parametrize(("text", "name", "encoding"), WRITTEN.values(), ids=WRITTEN)
def test_one_table_however_it_was_written(table, tmp_path, text, name, encoding):
    path = table(text, name, encoding)
    task = load_task(path)
    assert (task.name, task.root, task.modalities) == (path.stem, tmp_path, ("image",))
    assert task.labels == {0: "background", 1: "lesion", 2: "organ at risk"}
    assert task.training == tuple(
        {"case": case, "image": tmp_path / f"files/{name}.nii", "label": tmp_path / f"files/{name}l.nii"}
        for case, name in (("a", "x"), ("b", "y"))
    )
    assert (task.test, task.splits) == ((), ())
    assert load_task(tmp_path) == task


def test_a_table_in_a_folder_of_pairs_lists_its_cases(table, tmp_path):
    """The pairs were read, every label counted as looked for, and the table's split was ignored silently."""
    (tmp_path / "x.nii").touch()
    (tmp_path / "x_seg.nii").touch()
    table("case,age\nx,71\n", "patients.csv")
    listed = table("case,image,label,labelled\nx,x.nii,x_seg.nii,lesion\n")
    assert load_task(tmp_path) == load_task(listed)
    table(PLAIN, "more.tsv")
    with pytest.raises(DataError, match=r"contains the tables cases\.csv, more\.tsv; name one"):
        load_task(tmp_path)


def test_paths_may_lie_anywhere(table, tmp_path):
    path = table(f"case,image,label\na,{tmp_path}/files/x.nii,../files/xl.nii\n", "sub.csv")
    (tmp_path / "sub").mkdir()
    path = path.rename(tmp_path / "sub/cases.csv")
    (tmp_path / "sub/task.yaml").write_text("labels: {background: 0, lesion: 1}", encoding="utf-8")
    [case] = load_task(path).training
    assert (case["image"], case["label"]) == (tmp_path / "files/x.nii", tmp_path / "files/xl.nii")


def test_a_column_per_channel_what_was_looked_for_and_tests(table, tmp_path):
    path = table(
        "case,image_T1,image_FLAIR,label,labelled,split\n"
        "a,files/x.nii,files/x2.nii,files/xl.nii,2,train\n"
        "b,files/y.nii,files/y2.nii,files/yl.nii,lesion; organ at risk,training\n"
        "t,files/z.nii,files/z2.nii,,,test\n"
    )
    task = load_task(path)
    assert task.modalities == ("T1", "FLAIR")
    first, second = task.training
    assert first["image"] == (tmp_path / "files/x.nii", tmp_path / "files/x2.nii")
    assert (first["labelled"], second["labelled"]) == ((2,), (1, 2))
    assert task.test == ({"case": "t", "image": (tmp_path / "files/z.nii", tmp_path / "files/z2.nii")},)
    assert task.splits == ()


ROWS = [f"{case},files/{name}.nii,files/{name}l.nii" for case, name in (("a", "x"), ("b", "y"), ("c", "z"))]


def with_column(name, *cells):
    return "\n".join([f"case,image,label,{name}", *(f"{row},{cell}" for row, cell in zip(ROWS, cells, strict=True))])


def test_folds_of_a_column(table):
    assert load_task(table(with_column("fold", 1, 0, 1))).splits == (
        Split(training=("a", "c"), validation=("b",)),
        Split(training=("b",), validation=("a", "c")),
    )
    assert load_task(table(with_column("fold", 0, "", 1))).splits == (  # b always trains
        Split(training=("b", "c"), validation=("a",)),
        Split(training=("a", "b"), validation=("c",)),
    )


def test_a_split_of_a_column(table):
    assert load_task(table(with_column("split", "Train", "val", "train"))).splits == (
        Split(training=("a", "c"), validation=("b",)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"cases\.csv lists no case; needed: a line of column names \(case, image, label"),
        ("case,image,lable\na,files/x.nii,files/xl.nii", r"needs a column 'label'; did you mean 'lable'\?"),
        ("id,image,label\na,files/x.nii,files/xl.nii", r"needs a column 'case'; known: id, image, label"),
        ("case,scan,label\na,files/x.nii,files/xl.nii", r"needs either a column 'image' or .*, got case, scan, label"),
        ("case,image,image_T1,label\na,x,x,x", r"needs either a column 'image' or a column 'image_NAME'"),
        ("case,image,label,labeled\na,x,x,1", r"has a column 'labeled'; rename it to 'labelled', or to a less similar"),
        ("case,image_T2,imageADC,label\na,x,x,x", r"has a column 'imageADC'; rename it to 'image_ADC' if it is a"),
        ("case,image,label,Label\na,x,x,x", r"has two columns called 'label'; keep one of them"),
        ("case,image,label\na,x", r"line 2 has 2 cells; needed: 3, as in the header"),
        ('case,image,label\na,"x,y', r"cannot be read as a table: unexpected end of data"),
        ("case,image,label\na,files/x.nii,", r"line 2: 'label' is empty; needed: a path \(a case without a label"),
        ("case,image,label\n,files/x.nii,files/xl.nii", r"line 2 calls a case ''; needed: a valid file name"),
        ("case,image,label\na,C:\\x.nii,files/xl.nii", r"'image' is 'C:\\\\x\.nii', a path of another system"),
        ("case,image,label\na,files/x.nii,files/gone.nii", r"1 file\(s\) that do not exist: files/gone\.nii; fetch"),
        (with_column("fold", 0, 1, 3), r"'fold' contains \[0, 1, 3\]; needed: the numbers 0, 1, 2 \.\.\. without"),
        (with_column("fold", 0, 1, "x"), r"line 4: 'fold' is 'x'; needed: the number of the fold"),
        (with_column("fold", 0, 0, 0), r"a split needs cases to train on, got none"),
        (with_column("split", "train", "tset", "val"), r"line 3: 'split' is 'tset'; did you mean 'test'\?"),
        (with_column("fold,split", "0,val", "1,", ","), r"chooses the validation cases both by 'fold' and by 'split'"),
        (with_column("labelled", "lesoin", "", ""), r"a: 'labelled' contains 'lesoin', .*; did you mean 'lesion'\?"),
    ],
)
def test_what_cannot_be_trusted_is_refused(table, text, message):
    with pytest.raises(DataError, match=message):
        load_task(table(text))


def test_what_was_looked_for_stands_in_the_table(table, tmp_path):
    """A manifest next to it may describe other cases; it is not ignored silently."""
    (tmp_path / "dataset.json").write_text(json.dumps({**NAMES, "labelled": {"q": [1]}}), encoding="utf-8")
    with pytest.raises(DataError, match=r"dataset\.json has 'labelled'; move it to a column 'labelled' of "):
        load_task(table(PLAIN))
    assert [case.get("labelled") for case in load_task(table(with_column("labelled", 1, "", ""))).training] == [
        (1,),
        None,
        None,
    ]


def test_another_encoding_is_named(table):
    with pytest.raises(DataError, match=r"cases\.csv is not text in UTF-8 .*; save it as CSV in UTF-8"):
        load_task(table(PLAIN, encoding="utf-16"))


def test_what_is_not_read_is_said(table, caplog):
    with caplog.at_level(logging.INFO, logger="volseg.data"):
        load_task(table("case,image,label,age,sex\na,files/x.nii,files/xl.nii,71,f"))
    assert "training ignores the column(s) age, sex, unless split.group names them" in caplog.text


def test_a_table_of_images_to_predict(table, tmp_path):
    path = table("case,image_ADC,image_T2\na,files/x.nii,files/x2.nii\n")
    assert read_images(path, ("T2", "ADC")) == [
        {"case": "a", "image": (tmp_path / "files/x2.nii", tmp_path / "files/x.nii")}
    ]
    with pytest.raises(DataError, match=r"the task declares the channels T1, T2, but the images have ADC, T2"):
        read_images(path, ("T1", "T2"))
    assert read_images(table("case,image\na,files/x.nii\n"), ("T2", "ADC")) == [
        {"case": "a", "image": tmp_path / "files/x.nii"}
    ]
