"""Vector envs of this package in the clothes of other libraries; each imports that library itself."""
