"""The picture of a plan: drawn to scale, nothing left out silently, small, readable as XML."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.planner import TensorSpec, plan
from vescale_fsdp_tune.commands.picture import html, svg

# What plan thinks of the padding of these groups is tested where plan is.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SVG = "{http://www.w3.org/2000/svg}"


def example():
    """The planner's: S = 6, padding at 0, 1 and 13."""
    specs = [TensorSpec("a", (2, 4), 4), TensorSpec("b", (3,), 1), TensorSpec("c", (5, 2), 2)]
    return plan(specs, 4)


def gpt_block(num_shards):
    """12 tensors of GPT-2, matrices in blocks of 32 rows."""
    shapes = {
        "ln_1.weight": (768,),
        "ln_1.bias": (768,),
        "attn.c_attn.weight": (2304, 768),
        "attn.c_attn.bias": (2304,),
        "attn.c_proj.weight": (768, 768),
        "attn.c_proj.bias": (768,),
        "ln_2.weight": (768,),
        "ln_2.bias": (768,),
        "mlp.c_fc.weight": (3072, 768),
        "mlp.c_fc.bias": (3072,),
        "mlp.c_proj.weight": (768, 3072),
        "mlp.c_proj.bias": (768,),
    }
    specs = [
        TensorSpec(name, shape, 32 * shape[-1] if len(shape) > 1 else 1)
        for name, shape in shapes.items()
    ]
    return plan(specs, num_shards, alignment=8)


def experts(num_shards, rows=1):
    """782 tensors: 256 experts of three matrices, as in DeepSeek-V3, and 14 small ones."""
    specs = [TensorSpec(f"norm_{letter}.weight", (7168,), 1) for letter in "abcdefg"]
    for expert in range(256):
        specs.append(TensorSpec(f"experts.{expert}.gate_proj", (2048, 7168), rows * 7168))
        specs.append(TensorSpec(f"experts.{expert}.up_proj", (2048, 7168), rows * 7168))
        specs.append(TensorSpec(f"experts.{expert}.down_proj", (7168, 2048), rows * 2048))
    specs += [TensorSpec(f"bias_{letter}", (256,), 1) for letter in "hijklmn"]
    assert len(specs) == 782
    return plan(specs, num_shards, alignment=8)


def as_plan(*layouts, name="model", group="group", count=1):
    """What ``--json`` has of these groups, as far as pictures need it."""
    groups = [
        {
            "name": group,
            "count": count,
            "num_tensors": len(layout.specs),
            "num_elements": sum(spec.numel for spec in layout.specs),
            "shard_elements": layout.shard_size,
            "padding_elements": layout.padding,
            "padding_ratio": layout.padding_ratio,
            "order": layout.order_name,
            "tensors": [
                {
                    "name": spec.name,
                    "shape": list(spec.shape),
                    "block_elements": spec.block,
                    "offset_elements": offset,
                }
                for spec, offset in zip(layout.specs, layout.offsets, strict=True)
            ],
        }
        for layout in layouts
    ]
    num_shards = layouts[0].num_shards if layouts else 1
    return {"model": {"name": name}, "settings": {"num_shards": num_shards}, "groups": groups}


def picture(*layouts, **words):
    return ElementTree.fromstring(svg(as_plan(*layouts, **words)))


def drawn(root):
    """Class, title and boxes (left, top, right, bottom; a row is 1,000 x 1) of each path."""
    found = []
    for path in root.iter(f"{SVG}path"):
        title = path.find(f"{SVG}title")
        if title is not None:
            boxes = re.findall(r"M([\d.e-]+) (\d+)H([\d.e-]+)V(\d+)H", path.get("d"))
            numbers = [(float(a), int(b), float(c), int(d)) for a, b, c, d in boxes]
            found.append((path.get("class"), title.text, numbers))
    return found


def area(boxes):
    return sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)


def texts(root):
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def page_data(page):
    """What the page's script reads."""
    found = re.search(r'<script id="plan" type="application/json">(.*)</script>', page)
    return json.loads(found[1])


# --- To scale -------------------------------------------------------------------------------------


def test_the_example_is_drawn_element_by_element():
    sixth = 1000 / 6
    found = [
        (class_, [(round(a / sixth, 3), b, round(c / sixth, 3), d) for a, b, c, d in boxes])
        for class_, _, boxes in drawn(picture(example()))
    ]
    # Colours by size: c has 10 elements, a 8, b 3.
    assert found == [
        ("pad", [(0, 0, 2, 1)]),
        ("c1", [(2, 0, 6, 1), (0, 1, 4, 2)]),
        ("c2", [(4, 1, 6, 2), (0, 2, 1, 3)]),
        ("pad", [(1, 2, 2, 3)]),
        ("c0", [(2, 2, 6, 3), (0, 3, 6, 4)]),
    ]


@st.composite
def layouts(draw):
    sizes = st.tuples(st.integers(0, 30), st.integers(1, 9), st.sampled_from(["u", "v.0", "v.1"]))
    specs = [
        TensorSpec(f"{i}.{name}", (numel,), block)
        for i, (numel, block, name) in enumerate(draw(st.lists(sizes, max_size=8)))
    ]
    return plan(specs, draw(st.integers(1, 12)))


@given(layout=layouts())
def test_each_row_is_filled_with_what_the_rank_holds(layout):
    """Against ``local_range``: nothing overlaps, nothing is open, all padding is black."""
    size = layout.shard_size
    rows = [[] for _ in range(layout.num_shards)]
    for class_, title, boxes in drawn(picture(layout)):
        for left, top, right, bottom in boxes:
            for rank in range(top, bottom):
                name = "padding" if class_ == "pad" else title.split(" ", 1)[0]
                rows[rank].append((round(left * size / 1000), round(right * size / 1000), name))
    for rank, row in enumerate(rows):
        held = []
        for index, spec in enumerate(layout.specs):
            start, stop = layout.local_range(index, rank)
            if start < stop:
                at = layout.offsets[index] + start - rank * size
                held.append((at, at + stop - start, spec.name))
        row.sort()
        assert [piece for piece in row if piece[2] != "padding"] == sorted(held)
        ends = [stop for _, stop, _ in row]
        assert [start for start, _, _ in row] == [0, *ends][: len(row)]
        assert ends[-1:] == ([size] if size else [])


@pytest.mark.parametrize("num_shards", [10, 64, 1000, 10_240])
def test_areas_are_elements(num_shards):
    layout = experts(num_shards, rows=16)
    elements = {}
    for class_, _, boxes in drawn(picture(layout)):
        elements[class_] = elements.get(class_, 0) + area(boxes) * layout.shard_size / 1000
    matrices = 128 * 2048 * 7168  # half of the experts are in each of the two shades
    for class_ in ("c0", "d0", "c1", "d1", "c2", "d2"):
        assert elements[class_] == pytest.approx(matrices, rel=1e-3)
    assert elements["pad"] == pytest.approx(layout.padding, rel=1e-2)
    assert sum(elements.values()) == pytest.approx(layout.total_size, rel=1e-4)


def test_padding_is_told_in_words_too():
    words = texts(picture(example()))
    assert "3 tensors, 4 ranks of 6 elements, padding 14.3%, order: definition" in words
    assert "padding: 3" in words  # the legend
    titles = [title for class_, title, _ in drawn(picture(example())) if class_ == "pad"]
    assert titles == ["padding: 2 elements, rank 0", "padding: 1 element, rank 2"]


# --- Nothing is left out silently -----------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [10, 1000, 10_240])
def test_every_tensor_is_in_the_picture_with_its_ranks(num_shards):
    layout = experts(num_shards, rows=128)
    titles = {title.split(" ", 1)[0]: title for _, title, _ in drawn(picture(layout))}
    for index, spec in enumerate(layout.specs):
        ranks = [rank for rank, _, _ in layout.shard_ranges(index)]
        where = f"rank {ranks[0]:,}" if len(ranks) == 1 else f"{ranks[0]:,} to {ranks[-1]:,}"
        assert titles[spec.name].endswith(where)


def test_kinds_that_the_legend_has_no_line_for_are_counted():
    layout = plan([TensorSpec(f"w{i:03}", (100 - i,), 1) for i in range(80)], 4)
    root = picture(layout)
    assert "and 58 smaller kinds" in texts(root)  # of 24 lines, one is padding, one is this
    assert any(title.startswith("w079 ") for _, title, _ in drawn(root))


def test_of_many_groups_the_largest_are_drawn_and_that_is_said():
    groups = [plan([TensorSpec("w", (i + 1, 64), 1)], 2) for i in range(40)]
    found = as_plan(*groups)
    for index, group in enumerate(found["groups"]):
        group["name"] = f"g{index}"
    page = html(found)
    assert [each["name"] for each in page_data(page)["groups"]] == [
        f"g{i}" for i in range(39, 23, -1)
    ]
    assert "<title>model on 2 ranks, the 16 largest of 40 groups</title>" in page


def test_the_number_of_ranks_costs_nothing():
    # A loop over these ranks would never end.
    layout = plan([TensorSpec("w", (3 * 10**12, 4), 4), TensorSpec("b", (5,), 1)], 10**12)
    assert len(svg(as_plan(layout))) < 5_000


# --- Colours and words ----------------------------------------------------------------------------


def test_tensors_of_a_kind_alternate_between_two_shades():
    layout = plan([TensorSpec(f"{i}.w", (4,), 4) for i in range(4)], 2)
    assert [class_ for class_, _, _ in drawn(picture(layout))] == ["c0", "d0", "c0", "d0"]
    assert "*.w: 16 in 4 tensors" in texts(picture(layout))


def test_a_kind_has_one_colour_in_all_groups():
    one = plan([TensorSpec("0.w", (4,), 1), TensorSpec("0.b", (9,), 1)], 1)
    two = plan([TensorSpec("1.w", (8,), 1), TensorSpec("1.b", (1,), 1)], 1)
    # 12 elements of w and 10 of b, together
    assert [class_ for class_, _, _ in drawn(picture(one, two))] == ["c0", "c1", "c0", "c1"]


# --- As a file ------------------------------------------------------------------------------------

WILD = "<a href='x'> & \"b\" </script> \x00 \ud800 gewöhn 🙂"


def test_wild_names_are_escaped():
    found = as_plan(plan([TensorSpec(WILD, (4,), 1)], 2), name=WILD, group=WILD)
    root = ElementTree.fromstring(svg(found))
    readable = WILD.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert readable in texts(root)
    assert any(title.startswith(readable) for _, title, _ in drawn(root))
    page = html(found)
    assert "<a href" not in page
    assert page.count("</script>") == 2  # the page's own
    assert page_data(page)["groups"][0]["tensors"][0]["name"] == WILD


@pytest.mark.parametrize("num_shards", [10, 64, 1024, 10_240])
def test_files_stay_small(num_shards):
    found = as_plan(experts(num_shards, rows=1))
    assert len(svg(found)) < 400_000
    assert len(html(found)) < 600_000


def test_files_are_ascii_and_load_nothing():
    found = as_plan(gpt_block(100), name="gewöhnlich", group="größer")
    for text in (svg(found), html(found)):
        assert text.isascii()
        assert "prefers-color-scheme:dark" in text
        assert not re.search(r"\bsrc=|\bhref=|@import|url\(|fetch\(", text)


@pytest.mark.parametrize(
    "specs", [[], [TensorSpec("e", (0, 3), 1)], [TensorSpec("e", (0,), 1), TensorSpec("s", (), 1)]]
)
@pytest.mark.parametrize("num_shards", [1, 100])
def test_hardly_anything_can_be_drawn(specs, num_shards):
    layout = plan(specs, num_shards)
    assert all(spec.name in str(texts(picture(layout))) for spec in specs)
    assert len(page_data(html(as_plan(layout)))["groups"]) == 1


def test_no_group_is_a_picture_too():
    assert "nothing here on 1 rank" in texts(picture(name="nothing here"))


SCRIPT = """
import hashlib, json, sys
from vescale_fsdp_tune.commands.picture import html, svg
plan = json.loads(sys.argv[1])
print(hashlib.sha256((svg(plan) + html(plan)).encode()).hexdigest(), "torch" in sys.modules)
"""


def test_the_text_depends_on_the_arguments_only():
    """Sets and dicts in another order, in another process; and none of them imports torch."""
    specs = [TensorSpec(f"{i}.w{i % 3}", (i + 1,), 2) for i in range(50)]
    answers = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(as_plan(plan(specs, 40)))],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
    assert answers.pop().split()[1] == "False"
