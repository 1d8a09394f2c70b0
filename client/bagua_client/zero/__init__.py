"""An engine of DeepSpeed (ZeRO), as something whose configuration may change."""
