"""What decoder-only transformers in GGUF have in common, read into the parts of a `ModelSpec`.

An architecture's own file says how these parts are put together, and what is peculiar to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.errors import CorruptDataError, UnsupportedModelError
from common.gguf.reader import GGUFFile
from stage.model.hyperparameters import Hyperparameters
from stage.model.rope_metadata import read_rope
from stage.model.spec import (
    Activation,
    AttentionSpec,
    DenseFfnSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    MoeFfnSpec,
    NormSpec,
    RopeKind,
    RopeSpec,
)
from stage.model.tensors import TensorTable


class Decoder:
    """Reads one file's model, part by part; every part it is asked for counts as read.

    `context_length`: tokens the model is to be run with; None: its own limit.
    """

    def __init__(self, file: GGUFFile, context_length: int | None) -> None:
        hyperparameters = Hyperparameters(file)
        self.hyperparameters = hyperparameters
        self.tensors = TensorTable(file)
        self._source = str(file.paths[0])
        self.context_length = hyperparameters.count("context_length")
        self.run_context_length = context_length or self.context_length
        self.num_layers = hyperparameters.count("block_count")
        if self.num_layers > len(file.tensors):
            raise CorruptDataError(
                f"{self._source}: block_count is {self.num_layers}, but there are {len(file.tensors)} tensors"
            )
        self.hidden_size = hyperparameters.count("embedding_length")
        self.vocab_size = self._vocab_size(file)
        self.num_heads = hyperparameters.count_per_layer("attention.head_count", self.num_layers)
        self.num_kv_heads = hyperparameters.count_per_layer(
            "attention.head_count_kv", self.num_layers, self.num_heads
        )
        self.head_dim = hyperparameters.count("attention.key_length", self.hidden_size // self.num_heads[0])
        value_dim = hyperparameters.count("attention.value_length", self.head_dim)
        if value_dim != self.head_dim:
            raise UnsupportedModelError(
                f"{self._source}: heads with keys of {self.head_dim} and values of {value_dim} elements "
                "(attention.key_length, attention.value_length) are not supported"
            )
        self._eps = hyperparameters.positive("attention.layer_norm_rms_epsilon")

    def rope(self, kind: RopeKind) -> RopeSpec:
        return read_rope(self.hyperparameters, self.tensors, kind, self.head_dim, self.run_context_length)

    def sliding_window(self) -> int | None:
        """Positions a row sees, itself included; None: all earlier ones."""
        return self.hyperparameters.optional_count("attention.sliding_window")

    def attention(
        self,
        index: int,
        rope: RopeSpec,
        *,
        window: int | None = None,
        scale: float | None = None,
        qk_norm: bool = False,
        post_norm: bool = False,
    ) -> AttentionSpec:
        """Attention of layer `index`, from separate Q, K and V or a fused tensor.

        `scale` multiplies the scores: `attention.scale` of the file, else this, else 1 / sqrt(head_dim).
        """
        prefix = f"blk.{index}"
        num_heads, num_kv_heads = self.num_heads[index], self.num_kv_heads[index]
        if num_heads % num_kv_heads:
            raise CorruptDataError(
                f"{self._source}: layer {index} has {num_heads} heads, no multiple of its "
                f"{num_kv_heads} KV heads"
            )
        q, k, v = self._qkv(prefix, num_heads * self.head_dim, num_kv_heads * self.head_dim)
        return AttentionSpec(
            norm=self._norm(f"{prefix}.attn_norm"),
            q=q,
            k=k,
            v=v,
            output=self.tensors.linear(f"{prefix}.attn_output", self.hidden_size, num_heads * self.head_dim),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            scale=self.hyperparameters.number("attention.scale", 0.0) or scale or self.head_dim**-0.5,
            rope=rope,
            q_norm=self._norm(f"{prefix}.attn_q_norm", self.head_dim) if qk_norm else None,
            k_norm=self._norm(f"{prefix}.attn_k_norm", self.head_dim) if qk_norm else None,
            post_norm=self._norm(f"{prefix}.post_attention_norm") if post_norm else None,
            sliding_window=window,
            logit_softcap=self._softcap("attn_logit_softcapping"),
        )

    def dense_ffn(
        self, index: int, activation: Activation = Activation.SILU, post_norm: bool = False
    ) -> DenseFfnSpec:
        """The feed-forward part of layer `index`; gate and up may be fused (the gate's rows first)."""
        prefix = f"blk.{index}"
        size = self.hyperparameters.count_per_layer("feed_forward_length", self.num_layers)[index]
        if self.tensors.rows(f"{prefix}.ffn_up.weight") == 2 * size:
            gate, up = self.tensors.linears(f"{prefix}.ffn_up", (size, size), self.hidden_size)
        else:
            gate = self.tensors.linear(f"{prefix}.ffn_gate", size, self.hidden_size)
            up = self.tensors.linear(f"{prefix}.ffn_up", size, self.hidden_size)
        return DenseFfnSpec(
            norm=self._norm(f"{prefix}.ffn_norm"),
            gate=gate,
            up=up,
            down=self.tensors.linear(f"{prefix}.ffn_down", self.hidden_size, size),
            activation=activation,
            post_norm=self._norm(f"{prefix}.post_ffw_norm") if post_norm else None,
        )

    @property
    def has_experts(self) -> bool:
        return self.hyperparameters.optional_count("expert_count") is not None

    def moe_ffn(self, index: int) -> MoeFfnSpec:
        """The experts of layer `index`; gate and up may be fused (the gate's rows first)."""
        prefix = f"blk.{index}"
        hyperparameters, hidden_size = self.hyperparameters, self.hidden_size
        num_experts = hyperparameters.count("expert_count")
        num_experts_used = hyperparameters.count("expert_used_count")
        if num_experts_used > num_experts:
            raise CorruptDataError(
                f"{self._source}: expert_used_count is {num_experts_used}, of {num_experts} experts in all"
            )
        if self.tensors.has(f"{prefix}.ffn_gate.0.weight"):
            raise UnsupportedModelError(
                f"{self._source}: tensor '{prefix}.ffn_gate.0.weight': experts in a tensor each, as files of "
                "2023 have them, are not supported; take a newer file of this model"
            )
        key = "expert_feed_forward_length"
        size = hyperparameters.count_per_layer(
            key if hyperparameters.has(key) else "feed_forward_length", self.num_layers
        )[index]
        hyperparameters.accept("feed_forward_length")  # of the dense layers, of which there are none
        if self.tensors.has(f"{prefix}.ffn_gate_up_exps.weight"):
            name = f"{prefix}.ffn_gate_up_exps"
            gate, up = self.tensors.linears(name, (size, size), hidden_size, num_experts)
        else:
            gate = self.tensors.linear(f"{prefix}.ffn_gate_exps", size, hidden_size, num_experts)
            up = self.tensors.linear(f"{prefix}.ffn_up_exps", size, hidden_size, num_experts)
        return MoeFfnSpec(
            norm=self._norm(f"{prefix}.ffn_norm"),
            router=self.tensors.linear(f"{prefix}.ffn_gate_inp", num_experts, hidden_size),
            gate=gate,
            up=up,
            down=self.tensors.linear(f"{prefix}.ffn_down_exps", hidden_size, size, num_experts),
            activation=Activation.SILU,
            num_experts=num_experts,
            num_experts_used=num_experts_used,
        )

    def alike_layers(
        self, kind: RopeKind, ffn: Callable[[int], DenseFfnSpec | MoeFfnSpec], *, qk_norm: bool = False
    ) -> list[LayerSpec]:
        """The layers of a model in which one is like the other."""
        rope, window = self.rope(kind), self.sliding_window()
        return [
            LayerSpec(index, self.attention(index, rope, window=window, qk_norm=qk_norm), ffn(index))
            for index in range(self.num_layers)
        ]

    def model(self, layers: Sequence[LayerSpec], embedding_scale: float = 1.0) -> ModelSpec:
        """The whole model; raises `UnsupportedModelError` for what the file has and nothing has read."""
        embedding = EmbeddingSpec(
            self.tensors.ref("token_embd.weight", (self.vocab_size, self.hidden_size)), embedding_scale
        )
        head = HeadSpec(
            norm=self._norm("output_norm"),
            output=self._output(embedding),
            logit_softcap=self._softcap("final_logit_softcapping"),
        )
        self.hyperparameters.refuse_unread()
        self.tensors.refuse_unread()
        return ModelSpec(
            architecture=self.hyperparameters.architecture,
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            embedding=embedding,
            layers=tuple(layers),
            head=head,
        )

    def _output(self, embedding: EmbeddingSpec) -> LinearSpec:
        if self.tensors.has("output.weight"):
            return self.tensors.linear("output", self.vocab_size, self.hidden_size)
        return LinearSpec(embedding.weight, self.hidden_size, self.vocab_size)

    def _qkv(self, prefix: str, q_size: int, kv_size: int) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        if self.tensors.has(f"{prefix}.attn_qkv.weight"):
            sizes = (q_size, kv_size, kv_size)
            q, k, v = self.tensors.linears(f"{prefix}.attn_qkv", sizes, self.hidden_size)
        else:
            q = self.tensors.linear(f"{prefix}.attn_q", q_size, self.hidden_size)
            k = self.tensors.linear(f"{prefix}.attn_k", kv_size, self.hidden_size)
            v = self.tensors.linear(f"{prefix}.attn_v", kv_size, self.hidden_size)
        return q, k, v

    def _norm(self, name: str, size: int | None = None) -> NormSpec:
        return self.tensors.norm(name, size or self.hidden_size, self._eps)

    def _softcap(self, key: str) -> float | None:
        return self.hyperparameters.number(key, 0.0) or None

    def _vocab_size(self, file: GGUFFile) -> int:
        """The tokenizer's; where there is none, the number the file states, or the embedding's rows."""
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list):
            return len(tokens)
        return self.hyperparameters.count("vocab_size", self.tensors.rows("token_embd.weight"))
