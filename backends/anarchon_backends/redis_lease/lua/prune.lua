-- Old final runs, and definitions long gone (S2, S28, S30). At most `batch.room` runs go in all.

local function definitions_of(key)
  local all = read(key .. ':definitions', 'HGETALL', key .. ':definitions')
  local fields, kept = {}, {}
  for i = 1, #all, 2 do
    fields[all[i]] = all[i + 1]
  end
  for id, value in pairs(fields) do
    if not string.find(id, ':', 1, true) then
      local fine, definition = pcall(cjson.decode, value)
      if not fine or type(definition) ~= 'table' or type(definition.window_ms) ~= 'number' then
        broken(key .. ':definitions', 'definition ' .. id)
      end
      kept[#kept + 1] = {
        id = id, schedule_id = definition.schedule_id, window_ms = definition.window_ms,
        held_at = number(key, fields[id .. ':held_at'], 0),
      }
    end
  end
  return kept
end

local function drop_schedules(key, used)
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local schedule_id = string.match(field, '^since:(.*)$')
    if schedule_id and not used[schedule_id] then
      redis.call('HDEL', key, field, 'settled:' .. schedule_id)
    end
  end
end

-- Drops the definitions that nobody has held for the history (`machine.judge_definitions`).
-- Whether even the last may go, in which case none is dropped; and those that stay.
local function drop_definitions(key, job)
  local kept = definitions_of(key)
  local _, held = holds(key)
  local stay, gone, heir = {}, {}, nil
  for _, each in ipairs(kept) do
    if not held[each.id] and each.held_at < NOW - batch.history_ms then
      gone[#gone + 1] = each
    else
      stay[#stay + 1] = each
      stay[each.id] = true
      local later = heir and each.held_at == heir.held_at and each.id > heir.id
      if not heir or each.held_at > heir.held_at or later then
        heir = each
      end
    end
  end
  if #stay == 0 then
    return true, stay
  end
  if not stay[job.definition_id] then
    job.definition_id, job.schedule_id = heir.id, heir.schedule_id
    redis.call('HSET', key, 'definition_id', heir.id, 'schedule_id', heir.schedule_id)
  end
  for _, each in ipairs(gone) do
    redis.call('HDEL', key .. ':definitions', each.id, each.id .. ':held_at')
  end
  local used = {}
  for _, each in ipairs(stay) do
    used[each.schedule_id] = true
  end
  drop_schedules(key, used)
  return false, stay
end

-- The newest slot up to which the floor may be raised (`machine.in_use`, `machine.prune_bound`).
local function bound_of(key, job, definitions)
  local used = {}
  for _, hold in ipairs((holds(key))) do
    used[hold[1]] = true
  end
  if not next(used) then
    used[job.definition_id] = true
  end
  local bound = NOW
  for _, each in ipairs(definitions) do
    if used[each.id] then
      local settled = load_job(key, each.schedule_id).settled
      bound = math.min(bound, NOW - each.window_ms, settled or bound)
    end
  end
  return bound
end

-- The job's final runs up to `bound` that are too old or too many, oldest first.
local function prunable(key, bound, oldest, room, unused)
  local runs = key .. ':runs'
  local beyond = -1
  local too_many = redis.call('ZREVRANGE', runs, batch.history_max, batch.history_max)
  if too_many[1] then
    beyond = tonumber(too_many[1])
  end
  local reach = unused and '+inf' or text(math.min(bound, math.max(beyond, oldest - 1)))
  local slots, most = {}, room + LOOKED_AT
  for _, slot in ipairs(redis.call('ZRANGEBYSCORE', runs, '-inf', reach, 'LIMIT', 0, most)) do
    if #slots == room then
      break
    end
    local values = redis.call('HMGET', key .. ':' .. slot, 'state', 'ended_at')
    local at = math.max(tonumber(slot), tonumber(values[2] or '') or 0)
    if FINAL[values[1]] and (unused or tonumber(slot) <= beyond or at < oldest) then
      slots[#slots + 1] = slot
    end
  end
  return slots
end

local function delete_runs(key, name, slots)
  for _, slot in ipairs(slots) do
    local run = redis.call('HMGET', key .. ':' .. slot, 'trigger', 'request_id')
    if run[1] == 'manual' then
      redis.pcall('HDEL', key .. ':requests', run[2] or '')
    end
    redis.call('DEL', key .. ':' .. slot)
    redis.call('ZREM', key .. ':runs', slot)
    if NS then
      redis.call('ZREM', NS .. ':runs', slot .. ' ' .. name)
    end
  end
end

-- A job that nobody has any more: its floor and fence stay, for they must never fall.
local function forget_job(key, name)
  redis.call('HDEL', key, 'definition_id', 'schedule_id', 'definition_at', 'paused_at',
    'pause_reason')
  drop_schedules(key, {})
  redis.call('DEL', key .. ':definitions', key .. ':holds')
  if NS then
    redis.call('ZREM', NS .. ':jobs', name)
  end
end

local function prune_job(key, name, room)
  local job = load_job(key, '')
  local unused, definitions = drop_definitions(key, job)
  local bound = unused and 0 or bound_of(key, job, definitions)
  local slots = prunable(key, bound, NOW - batch.history_ms, room, unused)
  if #slots > 0 then
    redis.call('HSET', key, 'floor', text(math.max(job.floor, tonumber(slots[#slots]))))
    delete_runs(key, name, slots)
  end
  local forgotten = unused and redis.call('EXISTS', key .. ':runs') == 0
  if forgotten then
    forget_job(key, name)
  end
  return { gone = #slots, forgotten = forgotten }
end

local gone = 0
return reply({
  answers = answers_of(batch.items, function(item, key)
    if gone >= batch.room then
      return { gone = 0, unvisited = true }
    end
    local pruned = unless_broken(prune_job, key, item.job, batch.room - gone) or { gone = 0 }
    gone = gone + pruned.gone
    return pruned
  end),
})
