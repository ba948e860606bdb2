"""Models of Hugging Face's transformers, by name or from a folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from shoal.data.dataset import Data

KINDS = {
    "tokens": "AutoModelForSequenceClassification",
    "sequence": "AutoModelForCausalLM",
    "images": "AutoModelForImageClassification",
}


@dataclass(frozen=True)
class HuggingFace:
    """A model of Hugging Face's transformers, by name on the hub or from a folder (Wolf et al. 2020).

    Texts and images are classified; where each place of a sequence has a target, the model is a causal language model,
    whose vocabulary has to be that of the data. `pretrained = false` takes the architecture alone (config.json), with
    fresh values; texts need it, for they do not come from the tokenizer that a model was trained with. `options` are
    entries of its configuration, by transformers' names, like `num_hidden_layers`.
    Needs `pip install shoal[transformers]`.
    """

    path: str
    pretrained: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def build_for(self, data: Data) -> nn.Module:
        try:
            import transformers
        except ImportError as error:
            raise ValueError("needs Hugging Face's transformers: pip install 'shoal[transformers]'") from error
        from shoal.models.layers import Logits

        kind = _kind(data)
        if self.pretrained and kind != "images":
            raise ValueError(
                "pretrained = true: the numbers of this data set's tokens are not those of the tokenizer that the "
                "model was trained with, and what it learned would be lost; use pretrained = false"
            )
        options = {**self.options} if kind == "sequence" else {"num_labels": data.classes, **self.options}
        try:
            config = transformers.AutoConfig.from_pretrained(self.path, **options)
            known = getattr(config, "vocab_size", None)
            if kind != "images" and known is not None and known < data.sizes[0]:
                raise ValueError(f"it knows {known} tokens; the data has {data.sizes[0]}")
            if kind == "sequence" and known != data.classes:
                raise ValueError(f"it gives {known} tokens; the targets are of {data.classes}")
            auto = getattr(transformers, KINDS[kind])
            built = (
                auto.from_pretrained(self.path, config=config, ignore_mismatched_sizes=True)
                if self.pretrained
                else auto.from_config(config)
            )
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"cannot load {self.path!r}: {reason}; download it first, and give its folder") from error
        return Logits(
            built.float(), None if kind == "images" else getattr(config, "pad_token_id", None), kind == "images"
        )


def _kind(data: Data) -> str:
    if len(data.sizes) == 1 and len(data.shape) == 1:
        return "sequence" if data.task == "sequence" else "tokens"
    if not data.sizes and len(data.shape) == 3 and data.task == "classification":
        return "images"
    raise ValueError(f"inputs have shape {data.shape}; expected texts, (length,), of tokens, or images to classify")
