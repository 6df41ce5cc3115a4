"""Log-probabilities of given tokens."""

# V vocabulary

import torch
from torch import Tensor


def selected_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs (nats, float32, or float64 for float64 logits) [...] of ids [...] under logits [..., V].

    >>> selected_log_probs(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor([-1.3863, -1.3863])
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide, dim=-1).gather(-1, ids[..., None]).squeeze(-1)
