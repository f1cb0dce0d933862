//! Forms of domain values in storage. Ids and enums with codes derive `sqlx::Type`; enums with names use
//! `stored_name`. Column types exist with the feature `sqlx` only.

/// Completes an enum that derives its names with `strum` and is stored by name.
macro_rules! stored_name {
    ($name:ty) => {
        impl $name {
            /// Every value, in order of declaration.
            pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

            /// Returns the name used on the wire and in storage.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                self.into()
            }

            /// Parses a name used on the wire or in storage.
            #[must_use]
            pub fn parse(name: &str) -> Option<Self> {
                name.parse().ok()
            }
        }

        #[cfg(feature = "sqlx")]
        crate::columns::text_column!($name);
    };
}

/// Stores a type as text, by its `as_str` and `FromStr`. A text that does not parse fails the decoding.
#[cfg(feature = "sqlx")]
macro_rules! text_column {
    ($name:ty) => {
        impl sqlx::Type<sqlx::Postgres> for $name {
            fn type_info() -> sqlx::postgres::PgTypeInfo {
                <str as sqlx::Type<sqlx::Postgres>>::type_info()
            }

            fn compatible(info: &sqlx::postgres::PgTypeInfo) -> bool {
                <str as sqlx::Type<sqlx::Postgres>>::compatible(info)
            }
        }

        impl sqlx::postgres::PgHasArrayType for $name {
            fn array_type_info() -> sqlx::postgres::PgTypeInfo {
                <String as sqlx::postgres::PgHasArrayType>::array_type_info()
            }
        }

        impl sqlx::Encode<'_, sqlx::Postgres> for $name {
            fn encode_by_ref(
                &self,
                buffer: &mut sqlx::postgres::PgArgumentBuffer,
            ) -> Result<sqlx::encode::IsNull, sqlx::error::BoxDynError> {
                <&str as sqlx::Encode<'_, sqlx::Postgres>>::encode(self.as_str(), buffer)
            }
        }

        impl sqlx::Decode<'_, sqlx::Postgres> for $name {
            fn decode(value: sqlx::postgres::PgValueRef<'_>) -> Result<Self, sqlx::error::BoxDynError> {
                let text = <&str as sqlx::Decode<'_, sqlx::Postgres>>::decode(value)?;
                Ok(text.parse::<Self>()?)
            }
        }
    };
}

pub(crate) use stored_name;
#[cfg(feature = "sqlx")]
pub(crate) use text_column;
