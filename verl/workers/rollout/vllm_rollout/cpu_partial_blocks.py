"""Find blocks of vLLM's key-value cache that begin with the tokens a new request needs.

vLLM finds whole blocks only. So every sample of a prompt computes the prompt's last tokens again (all tokens, if they
fill no block), and a turn computes again what its last turn left behind the last whole block. With this module the
beginning of a block has a key as well, where a prompt ends and where a request ends.

A request that finds such a beginning is a partial hit, as vLLM calls it: the request gets a new block, and the worker
copies the beginning into that block. ``patch.share_partial_blocks`` puts this in place.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
    from vllm.v1.request import Request

_GROUP = bytes(4)  # vLLM ends every key with the number of a group of layers; here there is one


class Beginning(bytes):
    """The key of a block's first tokens: those tokens, and the hash of all before them."""


class PartialBlocks:
    """The beginnings of the blocks of one engine's cache, as keys in vLLM's own table.

    The table drops a key when the block is given away, and all of them when the prefix cache is reset.

    Args: ``manager`` is a ``KVCacheManager`` with prefix caching and one group of full-attention layers.
    """

    def __init__(self, manager: "KVCacheManager") -> None:
        (self._group,) = manager.coordinator.single_type_managers
        self._pool = manager.block_pool
        self._block_tokens: int = self._group.block_size

    def find(self, request: "Request", num_computed: int) -> "tuple[KVCacheBlock, int] | None":
        """Return a block that begins with the request's next tokens, and the number of these; None if there is none.

        The last token is never among them: the engine needs its logits.

        Args: ``num_computed`` is the number of tokens in the whole blocks that vLLM has found.
        """
        missing = request.num_tokens - 1 - num_computed
        number = num_computed // self._block_tokens
        if missing == self._block_tokens - 1 and number < len(request.block_hashes):
            # VLLM leaves out the last full block, to compute at least one token.
            block = self._usable(request.block_hashes[number] + _GROUP)
            if block is not None:
                return block, missing
        for count in range(min(missing, self._block_tokens - 1), 0, -1):
            block = self._usable(self._key(request, num_computed, count))
            if block is not None:
                return block, count
        return None

    def note(self, request: "Request", num_tokens: int) -> None:
        """Register the block in which the first ``num_tokens`` of a request end, so that other requests find it."""
        number, count = divmod(num_tokens, self._block_tokens)
        blocks: Sequence[KVCacheBlock] = self._group.req_to_blocks.get(request.request_id, ())
        if count and number < len(blocks) and not blocks[number].is_null:
            key = self._key(request, num_tokens - count, count)
            if self._block_of(key) is None:
                self._enter(key, blocks[number], num_tokens)

    def has_room(self, request: "Request", count: int) -> bool:
        """Whether a request needs no further block for the next ``count`` tokens, and fills none of those it has."""
        request_id = request.request_id
        end = request.num_computed_tokens + count
        group = self._group
        block_tokens = self._block_tokens
        return (
            request_id in group.num_cached_block
            and end <= len(group.req_to_blocks[request_id]) * block_tokens
            and min(end, request.num_tokens) < (group.num_cached_block[request_id] + 1) * block_tokens
        )

    def keys_of(self, blocks: "Sequence[KVCacheBlock]") -> "list[tuple[KVCacheBlock, Beginning]]":
        """Return all keys of beginnings that these blocks have."""
        further = self._pool.cached_block_hashes_by_block
        keys = ((block, key) for block in blocks for key in (block.block_hash, *further.get(block.block_id, ())))
        return [(block, key) for block, key in keys if isinstance(key, Beginning)]

    def keep(self, keys: "Sequence[tuple[KVCacheBlock, Beginning]]") -> None:
        """Restore keys that vLLM has dropped because their blocks are full."""
        for block, key in keys:
            self._enter(key, block, None)

    def _usable(self, key: bytes) -> "KVCacheBlock | None":
        """Return the block of a key, unless this step copies into it: the copies of a step are made at once."""
        block = self._block_of(key)
        if block is None or any(block is copy for _, copy in self._group._pending_cow_copies):
            return None
        return block

    def _block_of(self, key: bytes) -> "KVCacheBlock | None":
        return self._pool.cached_block_hash_to_block.get_one_block(cast("BlockHashWithGroupId", key))

    def _enter(self, key: Beginning, block: "KVCacheBlock", num_tokens: int | None) -> None:
        self._pool._insert_block_hash(cast("BlockHashWithGroupId", key), block, num_tokens=num_tokens)

    def _key(self, request: "Request", start: int, count: int) -> Beginning:
        before = request.block_hashes[start // self._block_tokens - 1] if start else b""
        tokens = array("q", request.all_token_ids[start : start + count]).tobytes()
        return Beginning(b"%d:%b%b%b%b" % (len(before), before, tokens, _extra_key(request, start, count), _GROUP))


def _extra_key(request: "Request", start: int, count: int) -> bytes:
    """Return the keys that tell requests with equal tokens apart: images, adapter, salt."""
    if not (request.mm_features or request.lora_request or request.cache_salt or request.prompt_embeds is not None):
        return b""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    return repr(generate_block_hash_extra_keys(request, start, start + count, 0)[0]).encode()
