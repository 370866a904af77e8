"""The batch that travels between the driver and the workers, and the operations on it."""

from verl.protocol.collectives import all_gather_data_proto as all_gather_data_proto
from verl.protocol.data_proto import OLD_LOG_PROBS_VERSION as OLD_LOG_PROBS_VERSION
from verl.protocol.data_proto import DataProto
from verl.protocol.data_proto import DataProtoConfig as DataProtoConfig
from verl.protocol.data_proto import DataProtoItem as DataProtoItem
from verl.protocol.data_proto import _padding_size_key as _padding_size_key
from verl.protocol.data_proto import collate_fn as collate_fn
from verl.protocol.data_proto import delayed_copies as delayed_copies
from verl.protocol.data_proto import fold_batch_dim as fold_batch_dim
from verl.protocol.data_proto import list_of_dict_to_dict_of_list as list_of_dict_to_dict_of_list
from verl.protocol.data_proto import pad_dataproto_to_divisor as pad_dataproto_to_divisor
from verl.protocol.data_proto import tensors_of as tensors_of
from verl.protocol.data_proto import unfold_batch_dim as unfold_batch_dim
from verl.protocol.data_proto import union_numpy_dict as union_numpy_dict
from verl.protocol.data_proto import unpad_dataproto as unpad_dataproto
from verl.protocol.futures import DataProtoFuture as DataProtoFuture
from verl.utils.batch.serialization import deserialize_single_tensor as deserialize_single_tensor
from verl.utils.batch.serialization import deserialize_tensordict as deserialize_tensordict
from verl.utils.batch.serialization import serialize_single_tensor as serialize_single_tensor
from verl.utils.batch.serialization import serialize_tensordict as serialize_tensordict
from verl.utils.py_functional import union_two_dict as union_two_dict
from verl.utils.tensordict_utils import union_tensor_dict

# Names that ``import *`` takes, as in the established verl interface; the other names above are imported by name.
__all__ = ["DataProto", "union_tensor_dict"]
