"""Predict a case with a trained model: a label map on the image's own grid, and its file.

`predictor` applies the model, `window_step` applies it to a batch of windows. `original_grid` resamples the
probabilities to the image's grid, `writing` writes the label map.
"""
