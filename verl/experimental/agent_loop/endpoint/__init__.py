"""The OpenAI-compatible endpoint, with which separate agent programs produce trajectories."""

from verl.utils.import_utils import lazy_exports

_HERE = "verl.experimental.agent_loop.endpoint"
_EXPORTS = {
    "Access": f"{_HERE}.server",
    "Endpoint": f"{_HERE}.server",
    "EndpointAgentLoop": f"{_HERE}.loop",
    "Policy": f"{_HERE}.session",
    "Session": f"{_HERE}.session",
}
__all__ = list(_EXPORTS)

__getattr__ = lazy_exports(__name__, _EXPORTS)
