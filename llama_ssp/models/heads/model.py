"""A trained head in memory, and its steps, eager or compiled."""

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from llama_ssp.distributed.comm import ALONE
from llama_ssp.models import attention
from llama_ssp.models.cache_layout import CacheShape
from llama_ssp.models.graph_sizes import WIDEST
from llama_ssp.models.heads.layers import Assistant, AssistantBlocks, DFlash, Eagle3
from llama_ssp.models.heads.settings import DFlashSettings, HeadSettings
from llama_ssp.models.interface import Loaded, Tally
from llama_ssp.models.kernels import attention as attention_kernel
from llama_ssp.models.kernels.build import complaint
from llama_ssp.models.kv_cache import Caches, KVCache
from llama_ssp.models.passes import Pass, RowSpan, all_rows
from llama_ssp.models.programs import Program, ProgramSpec, load_or_compile
from llama_ssp.models.quantization import scales_of

log = logging.getLogger(__name__)
HeadLayers = Eagle3 | DFlash | Assistant | AssistantBlocks  # the last one: a rank's part of an assistant


class HeadModel(Loaded):
    """A head on one device. `vocab` and `context` are of the texts that it reads, in the target's tokens."""

    ranks = ALONE
    drafts = 0  # of one pass; 0: they come one after the other
    shares_cache = False  # it reads the target's keys and values, and has none of its own
    ids_E: Tensor | None = None  # the target's ids of the head's tokens; None if they are the same
    shared: Collection[int] = ()  # addresses of tensors of the target's, which count there

    def __init__(
        self,
        head: HeadLayers,
        config: Any,
        *,
        cache_shapes: list[CacheShape],
        taps: tuple[int, ...],
        name: str,
        fast: bool,
    ) -> None:
        """`cache_shapes`: KV heads and their width of each block; `fast`: with compiled steps."""
        self.config = config
        self.name = name
        self.taps = taps
        self.is_compiled = fast
        self.vocab = int(config.vocab_size)
        self.context = int(config.max_position_embeddings)
        self.dim = int(config.hidden_size)
        table = next(head.parameters())
        self.device = table.device
        self.dtype = table.dtype
        self.attend: attention.Attend = attention.attend_rows
        self.caches = Tally()
        self._layers = head
        self.cache_shapes = cache_shapes

    @property
    def weights_bytes(self) -> int:
        tensors = [*self._layers.parameters(), *self._layers.buffers(), *scales_of(self._layers)]
        if self.ids_E is not None:
            tensors.append(self.ids_E)
        return sum({t.data_ptr(): t.nbytes for t in tensors if t.data_ptr() not in self.shared}.values())

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache.of(
            rows=rows,
            capacity=capacity,
            shapes=self.cache_shapes,
            dtype=self.dtype,
            device=self.device,
            tally=self.caches,
        )

    def _places(self, pass_: Pass, cache: KVCache) -> attention.Places:
        return cache.places(pass_.spans, self.attend)


class DFlashModel(HeadModel):
    """A head that gives all drafts in one pass. It runs eagerly: there is one pass a round."""

    def __init__(
        self,
        head: DFlash,
        config: Any,
        settings: DFlashSettings,
        *,
        cache_shapes: list[CacheShape],
        taps: tuple[int, ...],
        name: str,
        fast: bool,
    ) -> None:
        super().__init__(head, config, cache_shapes=cache_shapes, taps=taps, name=name, fast=fast)
        self.attend = attention.attend_blocks
        self.head = head
        self.width = settings.width
        self.drafts = settings.drafts
        self.mask_token = settings.mask_token

    @torch.inference_mode()
    def remember(self, state_TX: Tensor, pass_: Pass, cache: KVCache) -> None:
        """Reads the target's hidden states of the pass's positions."""
        self.head.remember(state_TX.to(self.device, self.dtype), self._places(pass_, cache), cache.layers)

    @torch.inference_mode()
    def logits(self, token_R: Tensor, pass_: Pass, cache: KVCache) -> Tensor:
        """Returns logits of all drafts of the pass's rows, (R, drafts, E).

        `token_R` has each row's last token. Its span begins there, and is `width` tokens long (W = 4):

            last token    mask    mask    mask
        """
        rows = len(token_R)
        token_RW = torch.full((rows, self.width), self.mask_token, device=self.device)
        token_RW[:, 0] = token_R.to(self.device).clamp(max=self.vocab - 1)
        logit_TE = self.head(token_RW.flatten(), self._places(pass_, cache), cache.layers)

        # All places give a draft, or all but that of the last token.
        logit_RWE: Tensor = logit_TE.view(rows, self.width, -1)
        return logit_RWE[:, self.width - self.drafts :]


class Eagle3Model(HeadModel):
    """A head that drafts one token after the other; z is what it makes of g and a token, and the next g."""

    def __init__(
        self,
        head: Eagle3,
        config: Any,
        settings: HeadSettings,
        *,
        cache_shapes: list[CacheShape],
        taps: tuple[int, ...],
        name: str,
        fast: bool,
    ) -> None:
        super().__init__(head, config, cache_shapes=cache_shapes, taps=taps, name=name, fast=fast)
        self.head = head
        self.settings = settings
        if self.is_compiled and self.device.type == "cpu":
            self.attend = attention_kernel.attend
        self._program: Program | None = None

    def new_states(self, rows: int, window: int) -> Tensor:
        """Returns room for g of `window` positions of each row, (rows * window, H)."""
        state_NH = torch.empty(rows * window, self.dim, dtype=self.dtype, device=self.device)
        self.caches.add(state_NH)
        return state_NH

    @torch.inference_mode()
    def fused(self, state_TX: Tensor) -> Tensor:
        """Returns g, (T, H), of the target's hidden states."""
        return self.head.fused(state_TX.to(self.device, self.dtype))

    @torch.inference_mode()
    def states(self, token_T: Tensor, g_TH: Tensor, pass_: Pass, cache: KVCache) -> Tensor:
        """Returns z, (T, H), of tokens and their g at the pass's positions."""
        (layer,) = cache.layers
        z_TH: Tensor = self.head(token_T.to(self.device), g_TH, self._places(pass_, cache), layer)
        return z_TH

    @torch.inference_mode()
    def step(self, token_T: Tensor, g_TH: Tensor, pass_: Pass, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Returns logits (R, E) and z (R, H) of each row's last position; takes what `states` takes."""
        places = self._places(pass_, cache)
        token_T = token_T.to(self.device)
        if len(pass_.spans) == 1:  # the number is on the device already
            last_R = cache.position_S[len(token_T) - 1 : len(token_T)]
        else:
            last_R = pass_.last_tokens()

        if self.is_compiled and pass_.width <= WIDEST:
            arguments = (token_T, g_TH, places.position_T, places.first_T, (last_R,), cache.layers)
            program = self._program or self._compile(arguments)
            if program is not None:
                logit_RE, z_RH = program(self.head, *arguments)
                return logit_RE, z_RH

        (layer,) = cache.layers
        return self.head.step(token_T, g_TH, last_R, places, layer)

    def prepare(
        self,
        widths: Iterable[int] = (),
        rows: int = 1,
        capacity: int = 8,
        ragged: bool = True,
        rewinds: int = 0,
    ) -> None:
        """Loads or compiles the step before it is needed; one serves all widths."""
        if self.is_compiled:
            zero_T = torch.zeros(2, dtype=torch.int64, device=self.device)
            g_TH = torch.zeros(2, self.dim, dtype=self.dtype, device=self.device)
            pass_ = Pass(spans=all_rows([0], [2]), device=self.device)
            self.step(zero_T, g_TH, pass_, self.new_cache(1, 8))

    def _compile(self, arguments: tuple[Any, ...]) -> Program | None:
        """Loads or compiles the step; None if the head cannot be compiled."""
        try:
            spec = ProgramSpec(
                function=draft_step, module=self.head, arguments=arguments, kinds=(repr(self.settings),)
            )
            self._program = load_or_compile(self, spec, {})
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler raises
            log.warning("engine: %s runs eagerly: it does not compile: %s", self.name, complaint(error))
            self.is_compiled = False
        return self._program


class AssistantModel(HeadModel):
    """A Gemma 4's assistant, or a rank's part of one. It runs eagerly, and reads the target's cache."""

    shares_cache = True

    def __init__(
        self,
        head: Assistant | AssistantBlocks,
        config: Any,
        settings: HeadSettings,
        *,
        cache_shapes: list[CacheShape],
        taps: tuple[int, ...],
        name: str,
        fast: bool,
    ) -> None:
        super().__init__(head, config, cache_shapes=cache_shapes, taps=taps, name=name, fast=fast)
        self.head = head
        self.width = settings.inputs

    def new_states(self, rows: int, window: int) -> Tensor:
        """Returns room for the target's states of `window` positions of each row, (rows * window, X)."""
        state_NX = torch.empty(rows * window, self.width, dtype=self.dtype, device=self.device)
        self.caches.add(state_NX)
        return state_NX

    @torch.inference_mode()
    def step(
        self, token_R: Tensor, state_RX: Tensor, texts: list[tuple[int, int]], cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """Returns logits (R, V) and the next state (R, X) of these rows of the target's cache.

        `texts` has each row and the length of its text, n. The query stands at the last token, n - 1, which
        the target has not read yet: it sees the keys of the positions before it.
        """
        assert isinstance(self.head, Assistant)
        turned = self.places(texts, cache, behind=1)
        seen = self.places(texts, cache, behind=2)
        return self.head.step(token_R.to(self.device), state_RX, turned, seen, cache.layers)

    @torch.inference_mode()
    def follow(self, texts: list[tuple[int, int]], cache: KVCache) -> None:
        """Computes this rank's part of `step`, where the first rank calls it."""
        assert isinstance(self.head, AssistantBlocks)
        rows = len(texts)
        self.head.embedded(torch.zeros(rows, dtype=torch.int64, device=self.device))
        wide = torch.promote_types(self.dtype, torch.float32)
        x_RQ = torch.zeros(rows, self.dim, dtype=wide, device=self.device)
        turned = self.places(texts, cache, behind=1)
        seen = self.places(texts, cache, behind=2)
        self.head(x_RQ, turned, seen, cache.layers)

    def places(self, texts: list[tuple[int, int]], cache: KVCache, behind: int) -> attention.Places:
        """Returns a place in each text: that of the last token is 1 behind its length."""
        return cache.places([RowSpan(row, length - behind, 1) for row, length in texts], self.attend)


def draft_step(
    head: Eagle3,
    token_T: Tensor,
    g_TH: Tensor,
    position_T: Tensor,
    first_T: Tensor,
    last: tuple[Tensor],
    caches: Caches,
) -> tuple[Tensor, Tensor]:
    """Calls `Eagle3.step`; the function that torch traces."""
    check: Callable[..., None] = torch._check
    for tensor in (token_T, *last, caches[0][0][0]):
        check(tensor.shape[0] >= 1)
    places = attention.Places(position_T=position_T, first_T=first_T, attend=attention_kernel.attend)
    return head.step(token_T, g_TH, *last, places, *caches)
