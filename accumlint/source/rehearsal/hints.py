"""What the names of calls tell that nobody can follow."""

from __future__ import annotations

import ast
import re

from accumlint.source.reading.facts import LOSS_WORDS, terminal
from accumlint.source.reading.words import found_in

TOLD_THE_MASK = "told-the-mask"  # cause of what a model returns that was told which targets count

fetches = found_in(
    re.compile(
        r"batch|sample|data|next|fetch|chunk|token|example|draw|pull|take|feed|read|rollout|rand|synth|episode|trajector|segment|slice|window",
        re.IGNORECASE,
    )
)
makes = found_in(re.compile(r"loader|dataset|iterator|sampler|^(create|build|make|init|setup)(_|$)|size|shape|count|num_", re.IGNORECASE))
gives_batches = found_in(re.compile(r"data_?loader|dataset$|sampler$|iterator$", re.IGNORECASE))
gives_settings = found_in(re.compile(r"^(omegaconf|hydra|yaml|ruamel|toml\w*|ml_collections|yacs|configparser|dotenv)(\.|$)"))
agrees = found_in(re.compile(r"reduce|gather|broadcast|sync|agree|consensus", re.IGNORECASE))
names_count = found_in(
    re.compile(
        r"(^|_)(n|num)_(items|targets|valid|tokens)|denominator|normali[sz]er|total_(tokens|targets|items)|item_count|token_count",
        re.IGNORECASE,
    )
)
is_verb = found_in(
    re.compile(
        r"^_?(build|create|make|load|get|init|setup|save|wrap|prepare|unwrap|print|count|freeze|eval|evaluate|train|test|run|resume|log|set|update|reset)(_|$)"
    )
)
is_part = found_in(
    re.compile(r"^((base_|language_|text_|vision_)?model|(\w+_)?(encoder|decoder|backbone|head|transformer|classifier)|unet)$")
)
speaks_of_loss = found_in(LOSS_WORDS)
masks_targets = found_in(
    re.compile(r"(^|_)(loss|labels?|targets?|response|completion|action|answer)_masks?$|(^|_)masked_(lm_)?(weights?|mask)$", re.IGNORECASE)
)


def is_told_the_mask(call: ast.Call) -> bool:
    """`model(ids, labels, loss_mask=mask)`: the loss that comes back is one of the targets that the mask leaves."""
    return any(masks_targets(word.arg or "") for word in call.keywords) or any(masks_targets(terminal(arg)) for arg in call.args)
