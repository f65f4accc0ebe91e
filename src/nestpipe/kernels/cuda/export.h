// What Python may call.
#pragma once

#define NESTPIPE_API extern "C" __attribute__((visibility("default")))
