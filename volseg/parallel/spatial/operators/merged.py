"""Which operators honour a cut dim that was merged with its neighbours (``plan.shards.Merged``).

Those that touch the cut only by zipping slabs, by ``aligned`` or by ``wrap``, and those that ask the volume for what it
owns. Every other operator gets the volume in planes, or is refused (see ``dispatch.in_planes``).
"""

from volseg.parallel.spatial.operators import (
    activations,
    autograd,
    channels,
    composites,
    conversions,
    counting,
    dims,
    distances,
    dropout,
    indexing,
    joins,
    losses,
    normalize,
    padding,
    pointwise,
    products,
    random,
    reductions,
    slices,
)
from volseg.parallel.spatial.table import honour_merged

honour_merged(
    *(activations.relu, activations.leaky_relu, activations.elu, activations.prelu, activations.sigmoid),
    *(activations.silu, activations.gelu),
    *(autograd.metadata, autograd.flag, autograd.data, autograd.grad_fn, autograd.per_slab, autograd.told),
    *(autograd.backward, autograd.backward_of_several, autograd.differentiate, autograd.register_hook),
    *(autograd.new_whole, autograd.formatted, autograd.values),
    *(channels.along_dim, channels.quantile, channels.normalize, channels.gather),
    *(dims.permute, dims.unsqueeze, dims.squeeze, dims.expand, dims.repeat, dims.repeat_interleave, dims.reshape),
    *(dims.transposed, dims.matrix_transposed, dims.at_least, dims.unfold),
    *(dropout.alpha_dropout, dropout.dropout, dropout.plain_dropout, dropout.channel_dropout, dropout.feature_dropout),
    *(joins.cat, joins.stack),
    *(counting.gathered, counting.bucketize, counting.search_sorted, counting.is_in),
    *(distances.cosine_similarity, distances.pairwise_distance, distances.distance, distances.triplet_margin_loss),
    *(losses.voxel_loss, losses.weighted_loss, losses.class_loss, losses.one_hot, composites.as_written),
    *(normalize.layer_norm, normalize.rms_norm),
    *(padding.pad, padding.flip, padding.flip_matrix, padding.roll),
    *(pointwise.pointwise, pointwise.activation, pointwise.in_place, pointwise.where, conversions.filled_like),
    *(conversions.convert_dtype, conversions.convert, conversions.moved, conversions.scatter),
    *(products.einsum, products.reversed_matmul, products.matmul, products.dot, products.outer, products.inner),
    *(products.tensordot, products.added_product, products.linear, products.attention),
    *(random.fill_randomly, random.bernoulli, random.random_like, random.random_integers_like, random.rrelu),
    *(reductions.reduce, reductions.logsumexp, reductions.any_or_all, reductions.product, reductions.count_nonzero),
    *(reductions.extreme, reductions.aminmax, channels.extremum, reductions.variance, reductions.norm),
    *(reductions.matrix_or_vector_norm, reductions.equal, reductions.allclose, reductions.masked_select),
    *(reductions.nanmean, reductions.trapezoid),
    *(
        indexing.getitem,
        indexing.setitem,
        indexing.index_select,
        indexing.index_changed,
        indexing.diff,
        indexing.embedding,
    ),
    *(slices.narrow, slices.select, slices.unbind, slices.split),
)
