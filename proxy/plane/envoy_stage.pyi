from typing_extensions import Buffer

def envoy_stage(
    data: Buffer,
) -> tuple[int, dict[str, str], bytes, bool, tuple[int, int] | None, bytes, bool] | None: ...
