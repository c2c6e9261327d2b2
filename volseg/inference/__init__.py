"""From a trained model and a case to a label map on the image's own grid, and to a file.

`predictor` applies the model, `window_step` to a batch of windows; `original_grid` takes its probabilities back,
`writing` writes the label map.
"""
