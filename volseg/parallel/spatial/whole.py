"""Functions that read whole tensors: losses and metrics that go through NumPy, filters of other packages."""

from collections.abc import Callable
from typing import Any

from volseg.device.torch_internals import tree_map_only
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["whole"]


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, called with the gathered tensor in the place of each volume among its arguments.

    Values and gradients are those of one device. The volume must fit there (on every process of a group, which all
    compute the same): gather what a loss needs, not what a layer makes.

    Parameters
    ----------
    function
        A function or module, such as ``monai.losses.HausdorffDTLoss()``.

    Examples
    --------
    >>> from monai.losses import HausdorffDTLoss
    >>> loss = whole(HausdorffDTLoss(softmax=True, to_onehot_y=True))
    """

    def on_whole_tensors(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(ShardedVolume, lambda volume: volume.full_tensor(), (args, kwargs))
        return function(*args, **kwargs)

    return on_whole_tensors
