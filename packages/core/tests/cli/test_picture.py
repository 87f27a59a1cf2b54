"""The picture of a buffer: drawn to scale, nothing left out silently, small, readable as XML."""

import dataclasses
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_fsdp.cli.picture import PictureGroup, html, svg
from vescale_fsdp.cli.picture.kinds import kind_of
from vescale_fsdp.cli.picture.markup import percent, short_count, shorten
from vescale_fsdp.cli.picture.rows import Gap, choose_rows, padding_of, rows_of, segments_of
from vescale_fsdp.planner import TensorSpec, plan

# What plan thinks of the padding of these groups is tested where plan is.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SVG = "{http://www.w3.org/2000/svg}"
BAR = 680  # pixels of a whole shard in a bar


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


def picture(layout, title="group"):
    """The parsed SVG of one group."""
    return ElementTree.fromstring(svg([PictureGroup(title, layout)], title="picture"))


def bars(root):
    """First rank, number of ranks, and rectangles (class, x, width) of each labelled bar."""
    found = []
    for group in root.iter(f"{SVG}g"):
        if "data-alike" in group.attrib:
            boxes = [
                (box.get("class"), float(box.get("x")) - 132, float(box.get("width")))
                for box in group.iter(f"{SVG}rect")
                if box.get("class") != "bar"
            ]
            found.append((int(group.get("data-first")), int(group.get("data-alike")), boxes))
    return found


def titles(root):
    return [title.text for title in root.iter(f"{SVG}title")]


def texts(root):
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def areas(root):
    """Pixels of each colour class in the overview, and pixels of a rank's line."""
    total = {}
    line = None
    for group in root.iter(f"{SVG}g"):
        if "data-ranks" not in group.attrib:
            continue
        bar = group.find(f"{SVG}rect")
        line = float(bar.get("width")) * float(bar.get("height")) / int(group.get("data-ranks"))
        for path in group.iter(f"{SVG}path"):
            boxes = re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H", path.get("d"))
            area = sum(
                (float(right) - float(left)) * (float(bottom) - float(top))
                for left, top, right, bottom in boxes
            )
            total[path.get("class")] = total.get(path.get("class"), 0) + area
    return total, line


# --- To scale -------------------------------------------------------------------------------------


def test_the_example_is_drawn_element_by_element():
    third = BAR / 6  # pixels of an element
    drawn = [
        [(class_, round(x / third, 3), round(width / third, 3)) for class_, x, width in boxes]
        for _, _, boxes in bars(picture(example()))
    ]
    # Colours by size: c has 10 elements, a 8, b 3.
    assert drawn == [
        [("pad", 0, 2), ("c1", 2, 4)],
        [("c1", 0, 4), ("c2", 4, 2)],
        [("c2", 0, 1), ("pad", 1, 1), ("c0", 2, 4)],
        [("c0", 0, 6)],
    ]


def test_widths_of_each_rank_add_up_to_the_shard():
    drawn = bars(picture(gpt_block(10)))
    assert [first for first, _, _ in drawn] == list(range(10))
    for _, num_ranks, boxes in drawn:
        assert num_ranks == 1
        assert sum(width for _, _, width in boxes) == pytest.approx(BAR, abs=1e-9)
        ends = [x + width for _, x, width in boxes]
        assert [x for _, x, _ in boxes] == pytest.approx([0, *ends[:-1]], abs=1e-9)


def test_padding_of_ten_ranks_is_drawn_in_full():
    layout = gpt_block(10)
    drawn = sum(
        width
        for _, _, boxes in bars(picture(layout))
        for class_, _, width in boxes
        if class_ == "pad"
    )
    assert layout.padding > 0
    assert drawn * layout.shard_size / BAR == pytest.approx(layout.padding, rel=1e-4)


@pytest.mark.parametrize("num_shards", [64, 256, 1000, 10_240])
def test_areas_of_the_overview_are_elements(num_shards):
    layout = experts(num_shards, rows=16)
    pixels, line = areas(picture(layout))
    elements = {class_: area / line * layout.shard_size for class_, area in pixels.items()}
    matrices = 128 * 2048 * 7168  # half of the experts are in each of the two shades
    for class_ in ("c0", "d0", "c1", "d1", "c2", "d2"):
        assert elements[class_] == pytest.approx(matrices, rel=0.01)
    assert sum(elements.values()) == pytest.approx(layout.total_size, rel=0.001)


def test_padding_is_told_in_words_too():
    words = texts(picture(example()))
    assert any("padding 3 elements, 14.29% of the tensors' size" in word for word in words)
    assert "padding: 3 elements, 14.29%" in words  # the legend
    assert [word for word in words if "padding (" in word] == [
        "2 padding (33.33%)",
        "1 padding (16.67%)",
    ]


def test_the_order_is_named():
    layout = dataclasses.replace(example(), order_name="by block")
    assert any(text.endswith("order: by block") for text in texts(picture(layout)))


def test_the_longest_bar_of_padding_says_what_it_stands_for():
    # 40 whole tensors of 3 elements, with an alignment of 4: a quarter of each shard.
    layout = plan([TensorSpec(str(i), (3,), 3) for i in range(40)], 40, alignment=4)
    assert layout.shard_size == 4
    assert any(
        "their padding, the longest 25.00% of a shard." in text for text in texts(picture(layout))
    )


# --- Nothing is left out silently -----------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [10, 1000, 10_240])
def test_every_tensor_is_in_the_picture(num_shards):
    layout = experts(num_shards, rows=128)
    named = " ".join(titles(picture(layout)))
    assert all(f"{spec.name} (" in named for spec in layout.specs)


def test_tensors_too_thin_to_see_are_named():
    # At 10 ranks a norm of 7,168 of 1,127 million elements is 0.004 pixels wide.
    legend = [text for text in texts(picture(experts(10))) if "too thin to see" in text]
    assert "norm_a.weight: 7.17k elements, too thin to see" in legend
    assert len(legend) == 14


def test_ranks_that_have_no_bar_are_counted():
    root = picture(experts(1024, rows=128))
    drawn = sum(num_ranks for _, num_ranks, _ in bars(root))
    left_out = [
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) ranks? not", str(texts(root)))
    ]
    assert len(bars(root)) == 36
    assert drawn + sum(left_out) == 1024
    assert any(f"A closer look at {drawn} of the 1,024 ranks" in text for text in texts(root))


def test_kinds_that_the_legend_has_no_line_for_are_counted():
    layout = plan([TensorSpec(f"w{i:03}", (100 - i,), 1) for i in range(80)], 4)
    root = picture(layout)
    # 40 + 39 + ... + 21 elements
    assert "and 20 smaller kinds: 610 elements" in texts(root)
    assert any("w079" in title for title in titles(root))


def test_ranks_that_look_alike_share_a_bar():
    # 'a' needs more than 1,000 shards of 99 elements have to spare, so S = 198, and half are empty.
    layout = plan([TensorSpec("a", (10,), 1), TensorSpec("big", (1000, 99), 99)], 1000)
    root = picture(layout)
    assert layout.shard_size == 198
    assert [(first, alike) for first, alike, _ in bars(root)] == [
        (0, 1),
        (1, 499),
        (500, 1),
        (501, 499),
    ]
    assert "ranks 1\u2013499" in texts(root)
    assert "499 alike, 100% padding" in texts(root)


def test_ranks_with_different_tensors_of_a_kind_share_a_bar():
    layout = plan([TensorSpec(f"experts.{i}.w", (7,), 7) for i in range(64)], 64)
    assert [(first, alike) for first, alike, _ in bars(picture(layout))] == [(0, 64)]
    assert "experts.#.w" in texts(picture(layout))


# --- Rows, in integers ----------------------------------------------------------------------------


@st.composite
def layouts(draw):
    sizes = st.tuples(st.integers(0, 30), st.integers(1, 9), st.sampled_from(["u", "v.0", "v.1"]))
    specs = [
        TensorSpec(f"{i}.{name}", (numel,), block)
        for i, (numel, block, name) in enumerate(draw(st.lists(sizes, max_size=8)))
    ]
    return plan(specs, draw(st.integers(1, 12)))


@given(layout=layouts(), merge=st.booleans())
def test_rows_say_what_each_rank_holds(layout, merge):
    """Against ``local_range``: where tensors begin and end, all ranks once, in order."""
    kinds = [kind_of(spec.name) for spec in layout.specs]
    rank = 0
    for row in rows_of(layout, segments_of(layout), kinds, merge=merge):
        assert row.first == rank
        while rank <= row.last:
            held = []
            for index in range(len(layout.specs)):
                start, stop = layout.local_range(index, rank)
                if start < stop:
                    at = layout.offsets[index] + start - rank * layout.shard_size
                    held.append((at, at + stop - start, kinds[index], index, start))
            shown = [piece for piece in row.pieces if piece.tensor is not None]
            assert [(p.start, p.stop, kinds[p.tensor]) for p in shown] == [
                h[:3] for h in sorted(held)
            ]
            if row.same_tensors:
                assert [piece.tensor for piece in shown] == [h[3] for h in sorted(held)]
            if rank == row.first:
                assert [piece.skipped for piece in shown] == [h[4] for h in sorted(held)]
            filled = sum(stop - start for start, stop, *_ in held)
            assert padding_of(row) == layout.shard_size - filled
            rank += 1
        assert merge or row.num_ranks == 1
    assert rank == (layout.num_shards if layout.shard_size else 0)


@given(layout=layouts(), limit=st.integers(4, 9))
def test_chosen_rows_and_gaps_cover_all_ranks(layout, limit):
    rows = rows_of(layout, segments_of(layout), [spec.name for spec in layout.specs], merge=False)
    chosen = choose_rows(rows, limit)
    ends = [row.last for row in chosen]
    assert [row.first for row in chosen] == [0, *(end + 1 for end in ends[:-1])][: len(chosen)]
    assert sum(not isinstance(row, Gap) for row in chosen) == min(limit, len(rows))
    padding = sum(row.padding if isinstance(row, Gap) else padding_of(row) for row in chosen)
    assert padding == layout.padding


def test_the_number_of_ranks_costs_nothing():
    # A loop over these ranks would never end.
    layout = plan([TensorSpec("w", (3 * 10**12, 4), 4), TensorSpec("b", (5,), 1)], 10**12)
    text = svg([PictureGroup("group", layout)], title="picture")
    assert len(text) < 50_000
    assert len(bars(ElementTree.fromstring(text))) < 10


# --- Colours and words ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("experts.12.up_proj.weight", "experts.#.up_proj.weight"),
        ("0.layers.3", "#.layers.#"),
        ("mlp1.w2", "mlp1.w2"),  # two tensors of a layer, not two of a kind
        ("7", "#"),
    ],
)
def test_kind_of_a_name(name, kind):
    assert kind_of(name) == kind


def test_tensors_of_a_kind_alternate_between_two_shades():
    layout = plan([TensorSpec(f"{i}.w", (4,), 4) for i in range(4)], 2)
    assert [[class_ for class_, _, _ in boxes] for _, _, boxes in bars(picture(layout))] == [
        ["c0", "d0"],
        ["c0", "d0"],
    ]


def test_a_kind_has_one_colour_in_all_groups():
    groups = [
        PictureGroup("one", plan([TensorSpec("0.w", (4,), 1), TensorSpec("0.b", (9,), 1)], 1)),
        PictureGroup("two", plan([TensorSpec("1.w", (8,), 1), TensorSpec("1.b", (1,), 1)], 1)),
    ]
    root = ElementTree.fromstring(svg(groups, title="picture"))
    # 12 elements of w and 10 of b, together
    assert [[class_ for class_, _, _ in boxes] for _, _, boxes in bars(root)] == [
        ["c0", "c1"],
        ["c0", "c1"],
    ]


def test_short_words():
    numbers = [0, 999, 1000, 2304, 11_010_048, 147_456_000, 3_758_096_384]
    assert [short_count(n) for n in numbers] == ["0", "999", "1k", "2.3k", "11M", "147M", "3,758M"]
    ratios = [0, 0.00001, 0.0731, 0.99999, 1, 2.98]
    assert [percent(r) for r in ratios] == ["0%", "< 0.01%", "7.31%", "> 99.99%", "100%", "298.00%"]
    name = "experts.3.up_proj.weight"
    assert [shorten(name, room) for room in (24, 23, 10, 7, 6)] == [
        "experts.3.up_proj.weight",
        "experts.3.up_proj",
        "3.up_proj",
        "up_proj",
        "",
    ]


# --- As a file ------------------------------------------------------------------------------------

WILD = "<a href='x'> & \"b\" </script> \x00 \ud800 gewöhn 🙂"


def test_wild_names_are_escaped():
    groups = [PictureGroup(WILD, plan([TensorSpec(WILD, (4,), 1)], 2))]
    root = ElementTree.fromstring(svg(groups, title=WILD))
    readable = WILD.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert readable in texts(root)
    assert f"rank 0: {readable} (4,), elements 0 to 2 of 4" in titles(root)
    page = html(groups, title=WILD, facts=[(WILD, WILD)])
    assert "<a href" not in page
    assert page.count("</script>") == 1
    assert page.count("&lt;a href=&#x27;x&#x27;&gt; &amp; &quot;b&quot;") >= 5


@pytest.mark.parametrize("num_shards", [10, 64, 1024, 10_240])
def test_files_stay_small(num_shards):
    groups = [PictureGroup("782 tensors", experts(num_shards, rows=1))]
    assert len(svg(groups, title="picture")) < 400_000
    assert len(html(groups, title="picture")) < 600_000


def test_files_are_ascii_and_load_nothing():
    groups = [PictureGroup("größer", gpt_block(100))]
    for text in (svg(groups, title="gewöhnlich"), html(groups, title="gewöhnlich")):
        assert text.isascii()
        assert "prefers-color-scheme:dark" in text
        assert not re.search(r"\bsrc=|\bhref=|@import|url\(|fetch\(", text)


def test_a_page_has_its_facts_and_all_tensors():
    page = html([PictureGroup("layer", example())], title="plan of x", facts=[("peak", "3 & 4 GB")])
    assert "<title>plan of x</title>" in page
    assert "<dt>peak</dt><dd>3 &amp; 4 GB</dd>" in page
    # name, shape, block, elements, ranks; c starts at 14
    cells = "<td>c</td><td>(5, 2)</td><td>2</td><td>10</td><td>2&#8211;3</td>"
    assert f'<tr data-start="14" data-count="10">{cells}</tr>' in page
    assert '<section data-shard="6">' in page


@pytest.mark.parametrize(
    "specs", [[], [TensorSpec("e", (0, 3), 1)], [TensorSpec("e", (0,), 1), TensorSpec("s", (), 1)]]
)
@pytest.mark.parametrize("num_shards", [1, 100])
def test_hardly_anything_can_be_drawn(specs, num_shards):
    layout = plan(specs, num_shards)
    assert len(bars(picture(layout))) <= 2
    assert all(spec.name in str(texts(picture(layout))) for spec in specs)
    assert "<section" in html([PictureGroup("group", layout)], title="page")


def test_no_group_is_a_picture_too():
    assert "nothing here" in texts(ElementTree.fromstring(svg([], title="nothing here")))


SCRIPT = """
import hashlib, sys
from vescale_fsdp.cli.picture import PictureGroup, html, svg
from vescale_fsdp.planner import TensorSpec, plan
specs = [TensorSpec(f"{i}.w{i % 3}", (i + 1,), 2) for i in range(50)]
groups = [PictureGroup("g", plan(specs, 40))]
text = svg(groups, title="t") + html(groups, title="t", facts=[("a", "b")])
print(hashlib.sha256(text.encode()).hexdigest(), "torch" in sys.modules)
"""


def test_the_text_depends_on_the_arguments_only():
    """Sets and dicts in another order, in another process; and none of them imports torch."""
    answers = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
    assert answers.pop().split()[1] == "False"
