"""The program behind the figures of input-adaptive merging, from end to end on tiny experts."""

import pytest
import torch

from benchmarks import answers
from benchmarks.adaptive import CONTENDERS, evaluate, tune
from benchmarks.adaptive_contenders import marks, projection, run
from benchmarks.adaptive_costs import numbers, single_sentences, storage
from benchmarks.adaptive_setting import Data, Setting, Sizes, same_question
from benchmarks.reporting.sections import adaptive as section
from merganser.library import Library
from merganser.modules.inputs import Inputs
from merganser.routing.baselines import Smile, Static, TwinMerging, WeMoE
from merganser.routing.routers import CalibratedRouter

transformers = pytest.importorskip("transformers")

TASKS = ("mr", "subj", "trec", "cr")
CLASSES = (2, 2, 6, 2)
SENTENCES = 3


def last(found):
    *_, final = found
    return final


def sentences(task: int, count: int, seed: int):
    rng = torch.Generator().manual_seed(100 * task + seed)
    ids = torch.randint(6 * task, 6 * task + 6, (count, 5), generator=rng)
    mask = torch.ones_like(ids)
    mask[::2, 3:] = 0
    labels = torch.randint(0, CLASSES[task], (count,), generator=rng)
    return Inputs((), {"input_ids": ids, "attention_mask": mask}), labels


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    encoder = transformers.BertModel(config, add_pooling_layer=False).eval()
    base = {name: tensor.detach().clone() for name, tensor in encoder.named_parameters()}
    experts = {}
    for task in TASKS:
        experts[task] = {
            name: tensor + 0.1 * (torch.randn(tensor.shape[0], 2) @ torch.randn(2, tensor.shape[1]))
            if ".weight" in name and tensor.dim() == 2 and "layer." in name
            else tensor
            for name, tensor in base.items()
        }
    library = Library.build(base, experts, tmp_path_factory.mktemp("rows") / "text", rank_fraction=0.13)
    heads = {
        task: {"weight": torch.randn(classes, 16), "bias": torch.randn(classes)}
        for task, classes in zip(TASKS, CLASSES, strict=True)
    }
    test, tuning = ({task: [sentences(i, SENTENCES, seed)] for i, task in enumerate(TASKS)} for seed in (0, 1))
    support = {task: [sentences(i, SENTENCES, 2)[0]] for i, task in enumerate(TASKS)}
    right = {task: torch.tensor([True, True, False]) for task in TASKS}
    return Setting(library, heads, encoder, Data(test, tuning, support, lambda: support), right)


@pytest.fixture(scope="module")
def report(setting):
    with torch.no_grad():
        return last(evaluate(setting, [contender.name for contender in CONTENDERS], {}))


def test_every_contender_has_a_row_with_its_choice(report):
    assert set(report["rows"]) == {contender.name for contender in CONTENDERS}
    for contender in CONTENDERS:
        row = report["rows"][contender.name]
        best = max(share for rules in row["tuning"].values() for share in rules.values())
        assert set(row["tuning"]) == set(contender.settings)
        assert row["tuning"][row["setting"]][row["rule"]] == best
        found = {kind: answers.read({"0": row[kind]}, report["sentences"])["0"] for kind in ("label", "pair")}
        for task in TASKS:
            assert not (found["pair"][task] & ~found["label"][task]).any()
        assert row["forwards"] > 0
        assert row["numbers"] > 0
    assert "task" not in report["rows"]["TSV-M"]


def test_stored_rows_of_the_same_experts_are_kept(setting, report):
    stored = {**report, "rows": {"SMILE": {**report["rows"]["SMILE"], "forwards": 7.0}}}
    with torch.no_grad():
        assert last(evaluate(setting, ["SMILE"], stored))["rows"]["SMILE"]["forwards"] == 7.0
        stored["experts"] = {}
        assert last(evaluate(setting, ["SMILE"], stored))["rows"] == {"SMILE": report["rows"]["SMILE"]}


def test_contenders_have_as_many_settings_as_each_other():
    assert {len(contender.settings) for contender in CONTENDERS} == {3}


def test_rules_choose_heads_as_they_say(setting):
    model = setting.baseline(Smile, top=1)
    (x, labels) = setting.data.test["trec"][0]
    found = run(setting, model, [(x, labels)], "trec")
    votes = model.run(x)[1]
    assert found.answers["vote"][0].tasks == tuple(TASKS[i] for i in votes.argmax(1).tolist())
    assert found.told[0].tasks == ("trec",) * SENTENCES
    assert "vote" not in run(setting, setting.baseline(Static), [(x, labels)], "trec").answers
    right = marks(found.told, [(x, labels)], "trec", "pair")
    assert torch.equal(right, found.told[0].classes == labels)


def test_tuning_looks_at_validation_sentences_only(setting):
    with torch.no_grad():
        other = Setting(
            setting.library,
            setting.heads,
            setting.encoder,
            Data({}, setting.data.tuning, setting.data.support, setting.data.training),
            setting.experts,
        )
        assert tune(CONTENDERS[0], other)[1:] == tune(CONTENDERS[0], setting)[1:]


def test_polarity_tasks_share_their_labels():
    assert same_question("mr", "cr")
    assert same_question("trec", "trec")
    assert not same_question("trec", "mr")


def test_variants_that_share_passes_answer_as_on_their_own(setting):
    for contender in CONTENDERS[:3]:
        for build in contender.settings.values():
            model = build(setting)
            for task, parts in setting.data.test.items():
                found = run(setting, model, parts, task)
                for (x, _), prediction in zip(parts, found.answers["posterior"], strict=True):
                    alone = model.with_settings(score="posterior")(x)
                    assert prediction.sets == alone.sets
                    torch.testing.assert_close(prediction.logits, alone.logits, rtol=1e-4, atol=1e-4)


def test_sentences_are_shared_among_tasks():
    for tasks in (5, 8, 14, 20):
        assert Sizes.of(tasks).test * tasks >= 2000
        assert Sizes.of(tasks).support + Sizes.of(tasks).tuning <= 300


def test_single_sentences_are_unpadded_and_in_turn(setting):
    found = list(single_sentences(setting))
    assert len(found) == SENTENCES * len(TASKS)
    assert all(bool(x.mask.all()) for x in found)


def test_a_static_merge_stores_the_trained_tensors_once(setting):
    assert numbers(setting.baseline(Static), setting) == 1
    assert numbers(setting.baseline(Smile), setting) == numbers(setting.model(), setting)


def test_storage_by_shapes_is_what_models_store(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    layers = transformers.BertModel(config, add_pooling_layer=False).encoder.eval()
    base = {name: tensor.detach() for name, tensor in layers.named_parameters()}
    experts = {task: {name: tensor + torch.randn_like(tensor) for name, tensor in base.items()} for task in TASKS}
    library = Library.build(base, experts, tmp_path / "whole")
    heads = {task: {"weight": torch.randn(2, 16), "bias": torch.zeros(2)} for task in TASKS}
    setting = Setting(library, heads, layers, Data({}, {}, {}, dict), {})
    router = projection("base")(setting)
    router = CalibratedRouter(router, torch.eye(len(TASKS)), torch.zeros(len(TASKS)))
    models = {
        "MASS": setting.model(),
        "MASS, calibrated router": setting.model(router=router),
        "SMILE": setting.baseline(Smile),
        "Twin-Merging": setting.baseline(TwinMerging, router=router),
        "WeMoE": setting.baseline(WeMoE),
        "one merge": setting.baseline(Static),
    }
    counted = storage(layers, len(TASKS))
    assert {name: numbers(model, setting) for name, model in models.items()} == pytest.approx(
        {name: counted[name] for name in models}
    )
    assert counted["WeMoE"] < counted["WeMoE, whole task vectors"] < counted["the experts, whole"] == len(TASKS)


def test_the_section_reads_the_report(report):
    parts = list(section.parts({"sets": {"8": report}, "storage": {"8": {"MASS": 1.5}}}))
    assert len(parts) == 6
