from protos import model_pb2 as _model_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("stage_id", "instance_id", "protocol_version", "device", "epoch", "fingerprint", "layer_start", "layer_end", "weight_bytes", "kv_bytes", "resident_bytes", "page_cache_bytes", "busy_fraction", "num_kv_blocks", "kv_blocks_in_use", "num_sequences", "telemetry", "streaming")
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FRACTION_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    STREAMING_FIELD_NUMBER: _ClassVar[int]
    stage_id: str
    instance_id: str
    protocol_version: int
    device: _model_pb2.DeviceInfo
    epoch: int
    fingerprint: str
    layer_start: int
    layer_end: int
    weight_bytes: int
    kv_bytes: int
    resident_bytes: int
    page_cache_bytes: int
    busy_fraction: float
    num_kv_blocks: int
    kv_blocks_in_use: int
    num_sequences: int
    telemetry: _model_pb2.GpuTelemetry
    streaming: _model_pb2.StreamingStatus
    def __init__(self, stage_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., device: _Optional[_Union[_model_pb2.DeviceInfo, _Mapping]] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., page_cache_bytes: _Optional[int] = ..., busy_fraction: _Optional[float] = ..., num_kv_blocks: _Optional[int] = ..., kv_blocks_in_use: _Optional[int] = ..., num_sequences: _Optional[int] = ..., telemetry: _Optional[_Union[_model_pb2.GpuTelemetry, _Mapping]] = ..., streaming: _Optional[_Union[_model_pb2.StreamingStatus, _Mapping]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("model_path", "fingerprint", "context_length", "model_file")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FILE_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    fingerprint: str
    context_length: int
    model_file: str
    def __init__(self, model_path: _Optional[str] = ..., fingerprint: _Optional[str] = ..., context_length: _Optional[int] = ..., model_file: _Optional[str] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("fingerprint", "num_layers", "context_length", "layer_decode_s", "embedding_s", "head_s", "layer_weight_bytes", "layer_kv_bytes_per_token", "embedding_bytes", "head_bytes", "memory_budget_bytes", "kv_block_size", "offload_budget_bytes")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LAYER_DECODE_S_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_S_FIELD_NUMBER: _ClassVar[int]
    HEAD_S_FIELD_NUMBER: _ClassVar[int]
    LAYER_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    num_layers: int
    context_length: int
    layer_decode_s: float
    embedding_s: float
    head_s: float
    layer_weight_bytes: _containers.RepeatedScalarFieldContainer[int]
    layer_kv_bytes_per_token: _containers.RepeatedScalarFieldContainer[int]
    embedding_bytes: int
    head_bytes: int
    memory_budget_bytes: int
    kv_block_size: int
    offload_budget_bytes: int
    def __init__(self, fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., context_length: _Optional[int] = ..., layer_decode_s: _Optional[float] = ..., embedding_s: _Optional[float] = ..., head_s: _Optional[float] = ..., layer_weight_bytes: _Optional[_Iterable[int]] = ..., layer_kv_bytes_per_token: _Optional[_Iterable[int]] = ..., embedding_bytes: _Optional[int] = ..., head_bytes: _Optional[int] = ..., memory_budget_bytes: _Optional[int] = ..., kv_block_size: _Optional[int] = ..., offload_budget_bytes: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("epoch", "model_path", "fingerprint", "layer_start", "layer_end", "embedding", "head", "num_kv_blocks", "kv_block_size", "context_length", "max_step_tokens", "model_file", "window", "round", "shard_index", "shard_count")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FILE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    model_path: str
    fingerprint: str
    layer_start: int
    layer_end: int
    embedding: bool
    head: bool
    num_kv_blocks: int
    kv_block_size: int
    context_length: int
    max_step_tokens: int
    model_file: str
    window: int
    round: int
    shard_index: int
    shard_count: int
    def __init__(self, epoch: _Optional[int] = ..., model_path: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., embedding: _Optional[bool] = ..., head: _Optional[bool] = ..., num_kv_blocks: _Optional[int] = ..., kv_block_size: _Optional[int] = ..., context_length: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., model_file: _Optional[str] = ..., window: _Optional[int] = ..., round: _Optional[int] = ..., shard_index: _Optional[int] = ..., shard_count: _Optional[int] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("bytes_done", "bytes_total", "loaded", "weight_bytes", "kv_bytes")
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes_done: int
    bytes_total: int
    loaded: bool
    weight_bytes: int
    kv_bytes: int
    def __init__(self, bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., loaded: _Optional[bool] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachLinkRequest(_message.Message):
    __slots__ = ("epoch", "next_address", "next_window", "next_instance_id", "next_boot_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NEXT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    NEXT_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    next_address: str
    next_window: int
    next_instance_id: str
    next_boot_id: str
    def __init__(self, epoch: _Optional[int] = ..., next_address: _Optional[str] = ..., next_window: _Optional[int] = ..., next_instance_id: _Optional[str] = ..., next_boot_id: _Optional[str] = ...) -> None: ...

class AttachLinkResponse(_message.Message):
    __slots__ = ("carrier", "round_trip_s")
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    carrier: str
    round_trip_s: float
    def __init__(self, carrier: _Optional[str] = ..., round_trip_s: _Optional[float] = ...) -> None: ...

class StreamFramesRequest(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    def __init__(self, frame: _Optional[bytes] = ...) -> None: ...

class StreamFramesResponse(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    def __init__(self, frame: _Optional[bytes] = ...) -> None: ...

class StepItem(_message.Message):
    __slots__ = ("sequence_id", "start_position", "num_tokens", "token_ids", "from_ring", "sample_positions", "truncate_to", "new_blocks", "start")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FROM_RING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_TO_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    start_position: int
    num_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    from_ring: bool
    sample_positions: _containers.RepeatedScalarFieldContainer[int]
    truncate_to: int
    new_blocks: _containers.RepeatedScalarFieldContainer[int]
    start: SequenceStart
    def __init__(self, sequence_id: _Optional[int] = ..., start_position: _Optional[int] = ..., num_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., from_ring: _Optional[bool] = ..., sample_positions: _Optional[_Iterable[int]] = ..., truncate_to: _Optional[int] = ..., new_blocks: _Optional[_Iterable[int]] = ..., start: _Optional[_Union[SequenceStart, _Mapping]] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("sampling", "prior_token_ids", "logprobs", "top_logprobs")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIOR_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sampling: ResolvedSampling
    prior_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: bool
    top_logprobs: int
    def __init__(self, sampling: _Optional[_Union[ResolvedSampling, _Mapping]] = ..., prior_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class ResolvedSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "banned_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPEAT_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPEAT_LAST_N_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: _containers.RepeatedCompositeFieldContainer[_model_pb2.LogitBias]
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repeat_penalty: _Optional[float] = ..., repeat_last_n: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Iterable[_Union[_model_pb2.LogitBias, _Mapping]]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_id", "group", "repeat", "items", "freed_sequence_ids")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REPEAT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    FREED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    group: int
    repeat: int
    items: _containers.RepeatedCompositeFieldContainer[StepItem]
    freed_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step_id: _Optional[int] = ..., group: _Optional[int] = ..., repeat: _Optional[int] = ..., items: _Optional[_Iterable[_Union[StepItem, _Mapping]]] = ..., freed_sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("epoch", "steps")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    def __init__(self, epoch: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("sequence_id", "position", "token_id", "logprob", "top")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    position: int
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_model_pb2.TokenLogprob]
    def __init__(self, sequence_id: _Optional[int] = ..., position: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_model_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class SequenceFailure(_message.Message):
    __slots__ = ("sequence_id", "position", "reason")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    position: int
    reason: str
    def __init__(self, sequence_id: _Optional[int] = ..., position: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "repeat", "tokens", "failures")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    REPEAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    repeat: int
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    failures: _containers.RepeatedCompositeFieldContainer[SequenceFailure]
    def __init__(self, step_id: _Optional[int] = ..., repeat: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[SequenceFailure, _Mapping]]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("results", "acknowledged_steps")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_STEPS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[StepResult]
    acknowledged_steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, results: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ..., acknowledged_steps: _Optional[_Iterable[int]] = ...) -> None: ...
