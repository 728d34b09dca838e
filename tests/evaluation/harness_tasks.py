"""Tasks of the lm-eval harness: settings of each as YAML, to be formatted with the file of its rows."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
CAPITALS = [("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Peru", "Lima")]
CHOICE = """\
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{train: {rows}, test: {rows}}}}}
training_split: train
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{country}}}}:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""
PROSE = """\
task: countries
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{country}}}} has a capital."
metric_list: [{{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}]
metadata: {{version: 2.0}}
"""
WORDS = """\
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{country}}}}:"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: bypass, aggregation: bypass, higher_is_better: false}}]
metadata: {{version: 1.0}}
"""
SHUFFLED = """\
task: shuffled
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
process_docs: !function shuffle.process_docs
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{country}}}}:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
num_fewshot: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""
SHUFFLE = """\
import random
import datasets

def process_docs(dataset):
    rows = [dict(row) for row in dataset]
    for row in rows:
        right = row["choices"][row["label"]]
        random.shuffle(row["choices"])
        row["label"] = row["choices"].index(right)
    return datasets.Dataset.from_list(rows)
"""
GROUP = """\
group: geography
task: [capitals, countries]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
metadata: {version: 1.0}
"""
