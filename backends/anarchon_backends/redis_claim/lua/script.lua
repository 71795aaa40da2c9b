-- The claim of the strategy `script`: a key a slot, which only the first can set.

-- Whose token holds the slot from now on.
local function take(key, claim)
  local record = key .. ':claim:' .. text(claim.slot)
  local kept_ms = math.max(KEPT_LEAST_MS, claim.start_deadline_ms + KEPT_OVER_DEADLINE_MS)
  if redis.call('SET', record, claim.token, 'NX', 'PX', text(kept_ms)) then
    return claim.token
  end
  return read(record, 'GET', record)
end

-- Nothing to do: the server forgets each record when its time is over.
local function tend()
end

local function trim()
end

local function forget()
end
