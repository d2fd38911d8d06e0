"""Every kind of mistake with the message its maker sees: what, where, what would be right."""

from __future__ import annotations

import pytest

from merganser import recipes
from merganser.errors import CheckpointError, InputError, RecipeError

TWO = "models: [./a, ./b]"
#: A name -> the recipe, and what its message must contain.
UNREADABLE = {
    "empty": ("---\n", "the recipe is empty"),
    "not a mapping": ("- a\n- b\n", "a recipe is a mapping with a method and models, got list"),
    "not yaml": ("method: [linear\nmodels: x", "not valid YAML: line 2"),
    "tab": ("method: linear\n\tmodels: []\n", "not valid YAML: line 2, column 1"),
    "duplicate key": (
        "method: linear\nmodels: [./a]\nmethod: ties\n",
        "line 3: 'method' is given twice (first at line 1)",
    ),
    "duplicate key inside": (
        "method: linear\nmodels:\n - {path: a, weight: 1, weight: 2}\n",
        "line 3: 'weight' is given twice",
    ),
    "python object": ("method: !!python/object:os.system x\nmodels: [a]\n", "not valid YAML: line 1"),
    "two dialects": (f"method: linear\nmerge_method: linear\n{TWO}", "has method and merge_method"),
}
NATIVE = {
    "no method": (TWO + "\n", "method: is missing; `merganser methods` lists the methods"),
    "unknown method": (f"method: tiess\n{TWO}", "unknown method 'tiess'; did you mean 'ties'?"),
    "method of wrong type": (f"method: 3\n{TWO}", "method: expected text, got 3"),
    "unknown key": (f"method: linear\n{TWO}\nparameter: {{}}", "unknown key 'parameter'; did you mean 'parameters'?"),
    "swapped letters": (f"method: linear\n{TWO}\nmodles: []", "unknown key 'modles'; did you mean 'models'?"),
    "key of the output": (f"method: linear\n{TWO}\ndtype: float16", "unknown key 'dtype'; write it under 'output'"),
    "no models": ("method: linear\nseed: 0", "expected exactly one of models, slices and modules, got none of them"),
    "models and slices": (
        f"method: linear\n{TWO}\nslices: []",
        "expected exactly one of models, slices and modules, got models and slices",
    ),
    "empty models": ("method: linear\nmodels: []", "models: expected a list of models, got an empty list"),
    "models as text": ("method: linear\nmodels: ./a", "models: expected a list of models, got './a'"),
    "model as number": (
        "method: linear\nmodels: [./a, 3]",
        "models[1]: expected a path, a mapping with a path, or a recipe, got 3",
    ),
    "model without path": (
        "method: linear\nmodels: [{weight: 1}, ./b]",
        "models[0]: expected either path or recipe, got weight",
    ),
    "mergekit's key in a native recipe": (
        "method: linear\nmodels: [{model: ./a}, ./b]",
        "models[0]: expected either path or recipe, got model (which is mergekit's word",
    ),
    "path and recipe": (
        "method: linear\nmodels: [{path: a, recipe: {method: linear, models: [b]}}]",
        "models[0]: expected either path or recipe, got both",
    ),
    "empty path": ("method: linear\nmodels: ['', ./b]", "models[0]: an empty path"),
    "unknown parameter of a model": (
        "method: ties\nbase: ./c\nmodels: [./a, {path: ./b, densty: 0.5}]",
        "models[1]: unknown key or parameter 'densty'; did you mean 'density'?",
    ),
    "unknown parameter": (
        f"method: linear\n{TWO}\nparameters: {{weigth: 1}}",
        "parameters: unknown parameter 'weigth' of method 'linear'; did you mean 'weight'?",
    ),
    "parameters as list": (
        f"method: linear\n{TWO}\nparameters: [1]",
        "parameters: expected a mapping of parameters, got a list",
    ),
    "text for a number": (
        "method: linear\nmodels: [./a, {path: ./b, weight: much}]",
        "models[1].weight: expected a number, got 'much'",
    ),
    "text in a gradient": (
        f"method: linear\n{TWO}\nparameters: {{weight: [0, much]}}",
        "parameters.weight[1]: expected a number, got 'much'",
    ),
    "empty gradient": (
        f"method: linear\n{TWO}\nparameters: {{weight: []}}",
        "parameters.weight: a gradient needs at least one value",
    ),
    "null value": (
        f"method: linear\n{TWO}\nparameters: {{weight: null}}",
        "parameters.weight: expected a number, got None",
    ),
    "not a number": (
        f"method: linear\n{TWO}\nparameters: {{weight: .nan}}",
        "parameters.weight: expected a finite number",
    ),
    "out of bounds": (
        f"method: ties\nbase: ./c\n{TWO}\nparameters: {{density: 1.5}}",
        "parameters.density: 1.5 is out of bounds, must be in [0, 1]",
    ),
    "not a choice": (
        f"method: ties\nbase: ./c\n{TWO}\nparameters: {{scope: tensors}}",
        "parameters.scope: 'tensors' is not one of 'tensor', 'global'",
    ),
    "number for a switch": (
        f"method: linear\n{TWO}\nparameters: {{normalize: 7}}",
        "parameters.normalize: expected true or false, got 7",
    ),
    "shared parameter at a model": (
        "method: slerp\nmodels: [./a, {path: ./b, t: 0.5}]",
        "models[1].t: is one value for all models of a merge; move it to the recipe's parameters",
    ),
    "parameter twice": (
        "method: linear\nmodels: [./a, {path: ./b, weight: 1, parameters: {weight: 2}}]",
        "models[1].weight: is given twice, here and under parameters",
    ),
    "parameter under two names": (
        "method: ties\nbase: ./c\nmodels: [./a]\nparameters: {scale: 1, lambda: 1}",
        "'scale' is given twice, once under another name",
    ),
    "mergekit's filters": (
        f"method: linear\n{TWO}\nparameters: {{weight: [{{filter: mlp, value: 1}}]}}",
        "parameters.weight: lists of filter and value are mergekit's",
    ),
    "bad value of a glob": (
        f"method: linear\n{TWO}\nparameters: {{weight: {{'*.mlp.*': x}}}}",
        "parameters.weight['*.mlp.*']: expected a number, got 'x'",
    ),
    "override without match": (
        f"method: linear\n{TWO}\noverrides: [{{weight: 1}}]",
        "overrides[0].match: names no tensors",
    ),
    "override without change": (
        f"method: linear\n{TWO}\noverrides: [{{match: '*'}}]",
        "overrides[0]: changes nothing; expected a method, a model or parameters",
    ),
    "override of unknown method": (
        f"method: linear\n{TWO}\noverrides: [{{match: '*', method: slurp}}]",
        "overrides[0]: unknown method 'slurp'; did you mean 'slerp'?",
    ),
    "override with a foreign parameter": (
        f"method: ties\nbase: ./c\n{TWO}\noverrides: [{{match: '*', method: linear, density: 1}}]",
        "overrides[0]: unknown key or parameter 'density'",
    ),
    "unknown dtype": (
        f"method: linear\n{TWO}\noutput: {{dtype: bfloat17}}",
        "output.dtype: unknown dtype 'bfloat17'; did you mean 'bfloat16'?",
    ),
    "bad size": (
        f"method: linear\n{TWO}\noutput: {{shard_size: big}}",
        "output.shard_size: expected a size such as 5GB or 2GiB, got 'big'",
    ),
    "unknown output key": (
        f"method: linear\n{TWO}\noutput: {{dtypes: float32}}",
        "output: unknown key 'dtypes'; did you mean 'dtype'?",
    ),
    "bad tokenizer": (
        f"method: linear\n{TWO}\noutput: {{tokenizer: 3}}",
        "output.tokenizer: expected base, union, a model or a mapping, got 3",
    ),
    "bad padding": (
        f"method: linear\n{TWO}\noutput: {{tokenizer: {{source: base, pad_to_multiple_of: 0}}}}",
        "output.tokenizer.pad_to_multiple_of: expected 1 to 65536, got 0",
    ),
    "bad token source": (
        f"method: linear\n{TWO}\noutput: {{tokenizer: {{tokens: {{x: {{source: {{kind: model_token, model: a}}}}}}}}}}",
        "output.tokenizer.tokens['x'].source: expected either token or token_id",
    ),
    "bad seed": (f"method: linear\n{TWO}\nseed: lucky", "seed: expected a whole number, got 'lucky'"),
    "slice without layers": ("method: passthrough\nslices: [./a]", "slices[0]: a slice needs its layers"),
    "reversed layers": (
        "method: passthrough\nslices: [{path: ./a, layers: [4, 2]}]",
        "slices[0].layers: [4, 2] contains no layer; expected 0 <= first < last",
    ),
    "layers of three": (
        "method: passthrough\nslices: [{path: ./a, layers: [1, 2, 3]}]",
        "slices[0].layers: expected [first, last) as two whole numbers",
    ),
    "layers outside slices": (
        "method: linear\nmodels: [{path: ./a, layers: [0, 2]}, ./b]",
        "models[0].layers: layers can only be chosen in slices, not in models",
    ),
    "nested recipe": (
        "method: linear\nmodels: [./a, {recipe: {method: linnear, models: [./b]}}]",
        "models[1].recipe: method: unknown method 'linnear'; did you mean 'linear'?",
    ),
    "missing nested file": (
        "method: linear\nmodels: [./a, ./no-such-stage.yml]",
        "no-such-stage.yml: no such recipe file",
    ),
}
MERGEKIT = {
    "no method": ("base_model: a\nmodels: [{model: b}]", "merge_method: is missing"),
    "unknown method": (
        "merge_method: dare_tie\nmodels: [{model: a}]",
        "merge_method: unknown method 'dare_tie'; did you mean 'dare_ties'?",
    ),
    "models and slices": (
        "merge_method: linear\nmodels: [{model: a}]\nslices: [{sources: [{model: a, layer_range: [0, 1]}]}]",
        "expected exactly one of models, slices and modules, got models and slices",
    ),
    "nothing to merge": (
        "merge_method: linear\ndtype: float16",
        "expected exactly one of models, slices and modules, got none",
    ),
    "plain model": ("merge_method: linear\nmodels: [a]", "models[0]: expected a mapping with the key model, got 'a'"),
    "model typo": (
        "merge_method: linear\nmodels: [{modle: a}]",
        "models[0]: unknown key 'modle'; did you mean 'model'?",
    ),
    "wrong type of a density": (
        "merge_method: ties\nbase_model: c\nmodels: [{model: a}, {model: b, parameters: {density: high}}]",
        "models[1].parameters.density: expected a number, got 'high'",
    ),
    "unknown parameter": (
        "merge_method: ties\nbase_model: c\nmodels: [{model: a, parameters: {desnity: 0.5}}]",
        "models[0].parameters: unknown parameter 'desnity' of method 'ties'; did you mean 'density'?",
    ),
    "filter without value": (
        "merge_method: linear\nmodels: [{model: a, parameters: {weight: [{filter: mlp}]}}]",
        "models[0].parameters.weight[0]: expected {filter, value}, got a mapping",
    ),
    "filter typo": (
        "merge_method: linear\nmodels: [{model: a, parameters: {weight: [{fliter: mlp, value: 1}]}}]",
        "models[0].parameters.weight[0]: unknown key 'fliter'; did you mean 'filter'?",
    ),
    "slice without range": (
        "merge_method: passthrough\nslices: [{sources: [{model: a}]}]",
        "slices[0].sources[0].layer_range: expected [first, last) as two whole numbers, got nothing",
    ),
    "slice without sources": (
        "merge_method: passthrough\nslices: [{}]",
        "slices[0].sources: expected a list, got nothing",
    ),
    "two tokenizers": (
        "merge_method: linear\nmodels: [{model: a}]\ntokenizer_source: base\ntokenizer: {source: union}",
        "tokenizer: tokenizer and tokenizer_source exclude each other",
    ),
    "circular stages": (
        "name: x\nmerge_method: linear\nmodels: [{model: y}]\n---\nname: y\nmerge_method: linear\nmodels: [{model: x}]",
        "the stages x, y depend on each other",
    ),
    "two unnamed stages": (
        "merge_method: linear\nmodels: [{model: y}]\n---\nmerge_method: linear\nmodels: [{model: x}]",
        "only the final merge may lack a name",
    ),
    "two stages of one name": (
        "name: x\nmerge_method: linear\nmodels: [{model: a}]\n---\nname: x\nmerge_method: linear\nmodels: [{model: b}]",
        "document 2: two stages are called 'x'",
    ),
    "a stage whose name is a list": (
        "name: [x]\nmerge_method: linear\nmodels: [{model: a}]\n---\nmerge_method: linear\nmodels: [{model: x}]",
        "document 1: name: expected text, got ['x']",
    ),
}


@pytest.mark.parametrize(
    ("text", "message"),
    [pytest.param(*case, id=f"{kind}: {name}") for kind, cases in
     (("unreadable", UNREADABLE), ("native", NATIVE), ("mergekit", MERGEKIT)) for name, case in cases.items()],
)  # fmt: skip
def test_the_message_says_what_and_where(text, message):
    with pytest.raises(RecipeError) as error:
        recipes.load(text + "\n")
    assert message in str(error.value)
    assert "pydantic" not in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        f"metod: linear\n{TWO}",
        "method: linear\nmodles: [./a, ./b]",
        "merge_metod: linear\nmodels: [{model: ./a}]",
        "merge_method: linear\nmodels: [{modle: ./a}]",
    ],
)
def test_a_misspelt_key_is_not_also_missing(text):
    with pytest.raises(RecipeError) as error:
        recipes.load(text)
    reported = [line for line in str(error.value).splitlines() if "no such file" not in line and "problems" not in line]
    assert len(reported) == 1
    assert "did you mean" in reported[0]


def test_all_problems_are_said_at_once_one_a_line():
    text = """
method: ties
base: ./c
models: [{path: ./a, densty: 1}, {path: ./b, weight: heavy}]
parameters: {density: 2}
output: {dtype: float17}
sed: 1
"""
    with pytest.raises(RecipeError) as error:
        recipes.load(text)
    lines = str(error.value).splitlines()
    assert lines[0] == "recipe: 8 problems"  # three of them models that are nowhere
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "unknown key 'sed'; did you mean 'seed'?",
        "models[0]",
        "models[1].weight",
        "parameters.density",
        "output.dtype",
        "base",
        "models[0]",
        "models[1]",
    ]


PLANS = {
    "no base": ("method: ties\nmodels: [a, b]", "a base model is needed"),
    "labels in place of globs": (
        "method: ties\nbase: base\nmodels: [a, b]\nparameters: {density: {a: 0.2, b: 0.3}}",
        "parameters: density: no tensor is called 'a' or 'b'; expected globs over tensor names",
    ),
    "too few models": ("method: slerp\nmodels: [a]\nparameters: {t: 0.5}", "got 1 model(s)"),
    "too many models": ("method: slerp\nmodels: [a, b, d]\nparameters: {t: 0.5}", "got 3 model(s)"),
    "required parameter": ("method: slerp\nmodels: [a, b]", "method 'slerp' needs the parameter 't'"),
    "weights that cancel": (
        "method: linear\nmodels: [{path: a, weight: 1}, {path: b, weight: -1}]",
        "the weights sum to zero",
    ),
    "layers out of range": (
        "method: passthrough\nslices: [{path: a, layers: [0, 9]}]",
        "slices[0]: asks for layers [0, 9] of a, which has 4 (0 to 3) under 'model.layers'",
    ),
    "slices of unequal length": (
        "method: slerp\nslices: [{models: [{path: a, layers: [0, 2]}, {path: b, layers: [0, 3]}]}]",
        "slices[0]: its models must have equally many layers, got 2 from a, 3 from b",
    ),
    "unknown model of an override": (
        "method: linear\nmodels: [a, b]\noverrides: [{match: '*norm*', method: passthrough, model: z}]",
        "overrides[0].model: 'z' is not a model of this merge",
    ),
    "ambiguous passthrough": (
        "method: linear\nmodels: [a, b]\noverrides: [{match: '*norm*', method: passthrough}]",
        "overrides[0]: name the model to pass through, under model",
    ),
    "nothing left": ("method: linear\nmodels: [a, b]\noutput: {exclude: '*'}", "everything is excluded"),
    "unknown template of mergekit's": (
        "merge_method: linear\nmodels: [{model: a}, {model: b}]\nchat_template: chatmll",
        "chat_template: 'chatmll' is neither",
    ),
    "a template too long for a path": (
        f"method: linear\nmodels: [a, b]\noutput: {{chat_template: {'x' * 5000}}}",
        "is neither a template, nor a file, nor a known name",
    ),
    "unknown template": (
        "method: linear\nmodels: [a, b]\noutput: {chat_template: chatmll}",
        "output.chat_template: 'chatmll' is neither a template, nor a file, nor a known name; did you mean 'chatml'?",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_only_the_models_reveal_is_said_before_a_weight_is_read(name, hub):
    text, message = PLANS[name]
    with pytest.raises(InputError) as error:
        recipes.plan(recipes.load(text), hub())
    assert message in str(error.value)


def test_a_missing_model_says_where_it_was_looked_for(tmp_path):
    (tmp_path / "recipe.yml").write_text("method: linear\nmodels: [./nowhere/a]\n")
    with pytest.raises(CheckpointError) as error:
        recipes.plan(recipes.load(tmp_path / "recipe.yml"))
    assert str(error.value).startswith("models[0]: ./nowhere/a: no such file or directory")
    assert f"beside the recipe in {tmp_path}, then in the working directory" in str(error.value)


def test_a_recipe_that_contains_itself(tmp_path):
    (tmp_path / "a.yml").write_text("method: linear\nmodels: [./b.yml]\n")
    (tmp_path / "b.yml").write_text("method: linear\nmodels: [./a.yml]\n")
    with pytest.raises(RecipeError, match="the recipe contains itself"):
        recipes.load(tmp_path / "a.yml")


@pytest.mark.parametrize(
    ("make", "message"), [("mkdir", "is a directory, not a recipe"), ("touch", "the recipe is empty")]
)
def test_paths_that_are_no_recipe(tmp_path, make, message):
    getattr(tmp_path / "r.yml", make)()
    with pytest.raises(RecipeError, match=message):
        recipes.load(tmp_path / "r.yml")
    with pytest.raises(RecipeError, match="no such recipe file"):
        recipes.load(tmp_path / "none.yml")
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(RecipeError, match="not a text in UTF-8; a recipe is YAML"):
        recipes.load(tmp_path / "binary.yml")


def test_a_path_too_long_for_a_path(tmp_path):
    (tmp_path / "recipe.yml").write_text(f"method: linear\nmodels: [{'x' * 5000}]")
    with pytest.raises(InputError, match=r"models\[0\]: x{199}…: no such file or directory"):
        recipes.plan(recipes.load(tmp_path / "recipe.yml"))
