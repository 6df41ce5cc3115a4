"""The tokenizer of a Hugging Face model, as the environment's text and the policy's tokens need it."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentrl.models.hf_turns import chat_turns


class HFTokenizer:
    """Text to ids and back, and the turns of an episode as the model's chat template frames them.

    A prompt is the user's first turn, after `instructions` and a blank line, an action the assistant's, an
    observation the user's next one. `end_id` ends an action: the special token with which the template ends
    the assistant's turn, even if the tokenizer names another one as its end of sequence. Without a template,
    or with `chat_template=False`, only the instructions are added, and the end of sequence ends actions.

    Text that spells a special token is encoded as plain text: an environment cannot end an action or forge a
    turn. Where the model has no padding token, its end token pads: padding never reaches attention or a loss.
    Raises ValueError for a tokenizer without an end-of-sequence token, or a template that cannot frame turns.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = Tokenizer(models.WordLevel({"<end>": 0, "run": 1, "view": 2}, unk_token="<end>"))
    >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> tok = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>"))
    >>> tok.encode("view run"), tok.decode([2, 1, tok.end_id]), tok.pad_id
    ([2, 1], 'view run', 0)
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, instructions: str = "", chat_template: bool = True
    ) -> None:
        self.tokenizer: Any = tokenizer
        self._lead = f"{instructions}\n\n" if instructions else ""
        has_turns = chat_template and bool(self.tokenizer.chat_template)
        self._turns = chat_turns(self.tokenizer, self.encode) if has_turns else None
        end_id = self.tokenizer.eos_token_id if self._turns is None else self._turns.end_id
        if end_id is None:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path or type(tokenizer).__name__} has no eos token, so "
                "nothing would end an action; set eos_token in its tokenizer_config.json"
            )
        pad_id = self.tokenizer.pad_token_id
        self.end_id = int(end_id)
        self.pad_id = self.end_id if pad_id is None else int(pad_id)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids that start an episode whose environment says `text`, up to the first action."""
        text = self._lead + text
        return self.encode(text) if self._turns is None else self._turns.prompt.ids(text, self.encode)

    def encode_observation(self, text: str) -> list[int]:
        """Ids that follow the `end_id` of an action to which the environment says `text`."""
        return self.encode(text) if self._turns is None else self._turns.observation.ids(text, self.encode)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are left out."""
        return self.tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
