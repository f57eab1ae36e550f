class QuantizedTensor:
    """No parameter is one without FP8."""
