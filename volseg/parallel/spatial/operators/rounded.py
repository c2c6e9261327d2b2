"""Which operators read an upsampled volume in the type that its slabs have, where torch has float32 under autocast.

Convolutions, which autocast has in that type anyway; what stands between an upsampling and its convolution in a
decoder: norms, the join or the sum with a skip, whose results are rounded once more than torch's; and what asks for no
value. Every other operator, whether anybody thought of it or not, gets the volume in float32 (see ``dispatch``).
"""

from volseg.parallel.spatial.lazy.uncut import SUMS
from volseg.parallel.spatial.operators import autograd, convolution, joins, normalize, pointwise
from volseg.parallel.spatial.table import read_rounded

read_rounded(
    *(convolution.convolution, convolution.transposed_convolution),
    *(normalize.batch_norm, normalize.instance_norm, normalize.group_norm),
    *(joins.cat, *SUMS, *pointwise.SUMS_IN_PLACE),
    *(autograd.metadata, autograd.flag, autograd.per_slab, autograd.told, autograd.register_hook),
    *(autograd.backward, autograd.backward_of_several, autograd.differentiate),
)
