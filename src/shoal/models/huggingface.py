"""Models of the Hugging Face transformers library, by name or from a folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from shoal.data.dataset import Data

AUTO_CLASSES = {
    "tokens": "AutoModelForSequenceClassification",
    "sequence": "AutoModelForCausalLM",
    "images": "AutoModelForImageClassification",
}


@dataclass(frozen=True)
class HuggingFace:
    """A model of the Hugging Face transformers library, by hub name or from a folder (Wolf et al. 2020).

    The model classifies texts or images. If every position of a sequence has a target, it is a causal language model,
    and its vocabulary must have the size of the data's vocabulary. `pretrained = false` uses only the architecture
    (config.json) and draws new initial values. Texts require it, because their tokens do not come from the tokenizer of
    the pretrained model. `options` are entries of the model's configuration with the names of the library, like
    `num_hidden_layers`. Requires `pip install shoal[transformers]`.
    """

    path: str
    pretrained: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def build_for(self, data: Data) -> nn.Module:
        try:
            import transformers
        except ImportError as error:
            raise ValueError(
                "requires the Hugging Face transformers library: pip install 'shoal[transformers]'"
            ) from error
        from shoal.models.layers import Logits

        kind = _input_kind(data)
        if self.pretrained and kind != "images":
            raise ValueError(
                "pretrained = true: this data set does not use the token ids of the tokenizer that the model was "
                "trained with, so the pretrained values would be useless; set pretrained = false"
            )
        options = {**self.options} if kind == "sequence" else {"num_labels": data.classes, **self.options}
        try:
            config = transformers.AutoConfig.from_pretrained(self.path, **options)
            vocabulary = getattr(config, "vocab_size", None)
            if kind != "images" and vocabulary is not None and vocabulary < data.sizes[0]:
                raise ValueError(f"the model has a vocabulary of {vocabulary} tokens; the data has {data.sizes[0]}")
            if kind == "sequence" and vocabulary != data.classes:
                raise ValueError(f"the model predicts {vocabulary} tokens; the targets have {data.classes}")
            auto_class = getattr(transformers, AUTO_CLASSES[kind])
            model = (
                auto_class.from_pretrained(self.path, config=config, ignore_mismatched_sizes=True)
                if self.pretrained
                else auto_class.from_config(config)
            )
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"cannot load {self.path!r}: {reason}; download the model and set path to its folder"
            ) from error
        return Logits(
            model.float(), None if kind == "images" else getattr(config, "pad_token_id", None), kind == "images"
        )


def _input_kind(data: Data) -> str:
    if len(data.sizes) == 1 and len(data.shape) == 1:
        return "sequence" if data.task == "sequence" else "tokens"
    if not data.sizes and len(data.shape) == 3 and data.task == "classification":
        return "images"
    raise ValueError(f"inputs have shape {data.shape}; expected texts of tokens, (length,), or images to classify")
