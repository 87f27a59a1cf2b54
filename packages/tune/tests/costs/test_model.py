from vescale_fsdp_tune.costs.model import FP32, Group, Tensor, joined, kinds, make_model


def group(*sizes: int) -> Group:
    return Group(tuple(Tensor(f"w{i}", (size,)) for i, size in enumerate(sizes)), FP32)


def test_equal_units_are_one_with_a_count_and_the_order_stays() -> None:
    a, b = [group(4)], [group(5, 6)]
    model = make_model("m", [group(1)], [("h.0", a), ("h.1", b), ("h.2", a), ("h.3", a)])
    assert [(unit.title, unit.count) for unit in model.units] == [
        ("root", 1),
        ("h.0,2-3", 3),
        ("h.1", 1),
    ]
    assert model.order == (0, 1, 2, 1, 1)
    assert model.num_parameters == 1 + 3 * 4 + 11


def test_names_that_differ_in_one_number_are_joined() -> None:
    assert joined(["layer", "layer"]) == "layer"
    assert joined(["h.0.x", "h.1.x", "h.2.x"]) == "h.0-2.x"
    assert joined(["h.0", "h.2", "h.4"]) == "h.0,2,4"


def test_names_that_cannot_be_joined_are_counted() -> None:
    assert joined([f"h.{i}" for i in range(0, 16, 2)]) == "h.0 and 7 more"
    assert joined(["a.0.b.0", "a.1.b.1"]) == "a.0.b.0 and 1 more"
    assert joined(["a", "b", "c.1"]) == "a and 2 more"


def test_title_of_a_group_names_its_dtype_where_there_are_several() -> None:
    frozen = Group((Tensor("w", (2,)),), FP32, trainable=False)
    (_, unit) = make_model("m", [], [("h", [group(1), frozen])]).units
    assert [unit.title_of(each) for each in unit.groups] == ["h, float32", "h, float32, frozen"]


def test_kinds_of_names() -> None:
    names = ["experts.0.up", "experts.17.up", "0.weight", "head2.w", "norms.3"]
    assert kinds(names) == ["experts.*.up", "experts.*.up", "*.weight", "head2.w", "norms.*"]
